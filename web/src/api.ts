// Requests to the server that this page came from. The token is sent in a header and kept for this tab only
// (sessionStorage): it is never part of an address.
import type { LogEvent } from "./types";

const KEY = "swell-token";

export class Refusal extends Error {
  constructor(readonly status: number, readonly code: string, message: string, readonly field: string | null, readonly hint: string | null) {
    super(message);
  }
}

let token: string | null = sessionStorage.getItem(KEY);
let onSignedOut: () => void = () => {};

export const signedIn = (): boolean => token !== null;
export const whenSignedOut = (action: () => void): void => void (onSignedOut = action);

export function keepToken(value: string): void {
  token = value;
  sessionStorage.setItem(KEY, value);
}

export function signOut(): void {
  token = null;
  sessionStorage.removeItem(KEY);
  onSignedOut();
}

async function refusal(answer: Response): Promise<Refusal> {
  try {
    const { error } = await answer.json();
    return new Refusal(answer.status, error.code, error.message, error.field ?? null, error.hint ?? null);
  } catch {
    return new Refusal(answer.status, "unknown", `the server answered ${answer.status}`, null, null);
  }
}

export async function send(method: string, path: string, body?: unknown, extra: Record<string, string> = {}, signal?: AbortSignal): Promise<Response> {
  const headers: Record<string, string> = { ...extra };
  const sent = token;
  if (sent) headers.Authorization = `Bearer ${sent}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, {
    method,
    headers,
    signal,
    body: body === undefined ? undefined : JSON.stringify(body),
    credentials: "omit",
    redirect: "error",
  });
  if (answer.ok) return answer;
  const error = await refusal(answer);
  if (answer.status === 401 && sent !== null && sent === token) signOut();
  throw error;
}

export async function get<T>(path: string, signal?: AbortSignal): Promise<T> {
  return (await send("GET", path, undefined, {}, signal)).json();
}

export async function post<T>(path: string, body?: unknown, extra: Record<string, string> = {}, signal?: AbortSignal): Promise<T> {
  return (await send("POST", path, body, extra, signal)).json();
}

export const pause = (ms: number, signal: AbortSignal): Promise<void> =>
  new Promise((done) => {
    const timer = setTimeout(done, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), done()), { once: true });
  });

// Reads server-sent events with the token in a header, which EventSource cannot. Returns when the stream ends.
async function readEvents(since: number, onEvents: (events: LogEvent[]) => void, onOpen: () => void, signal: AbortSignal): Promise<void> {
  const answer = await send("GET", `/v1/events/stream?since=${since}`, undefined, {}, signal);
  onOpen();
  const reader = answer.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const frames = (rest + part.value).split("\n\n");
    rest = frames.pop()!;
    const events: LogEvent[] = [];
    for (const frame of frames) {
      const line = frame.split("\n").find((one) => one.startsWith("data: "));
      if (line) events.push(JSON.parse(line.slice(6)));
    }
    if (events.length) onEvents(events);
  }
}

// Follows the event stream for ever, from the last number that was seen, with growing pauses between attempts.
export async function follow(
  since: number,
  onEvents: (events: LogEvent[]) => void,
  onState: (connected: boolean) => void,
  signal: AbortSignal,
): Promise<void> {
  let seen = since;
  let waitMs = 250;
  while (!signal.aborted) {
    try {
      await readEvents(
        seen,
        (events) => {
          seen = events[events.length - 1].seq;
          onEvents(events);
        },
        () => {
          waitMs = 250;
          onState(true);
        },
        signal,
      );
    } catch (error) {
      if (signal.aborted || (error instanceof Refusal && error.status === 401)) return;
    }
    onState(false);
    await pause(waitMs * (0.5 + Math.random()), signal);
    waitMs = Math.min(waitMs * 2, 8000);
  }
}
