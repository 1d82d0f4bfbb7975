import * as api from "../api";
import { h, toast } from "../dom";
import { duration, moment, parseDuration, words } from "../format";
import { state } from "../state";
import type { Job, Promised } from "../types";
import type { View } from "./view";

const TYPING_MS = 350;

function newKey(): string {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function submitView(): View {
  const field = (id: string, label: string, help: string, attributes: Record<string, string | number | boolean> = {}) => {
    const input = h("input", { id, autocomplete: "off", spellcheck: "false", "aria-describedby": `${id}-help`, input: later, ...attributes });
    return { input, box: h("div", { class: "field" }, h("label", { for: id }, label), input, h("small", { id: `${id}-help` }, help)) };
  };
  const script = field("script", "Script", "On the server's machine; a relative path is relative to the directory.", { required: true, placeholder: "train.py" });
  const workdir = field("workdir", "Directory", "An absolute path on the server's machine.", { required: true, placeholder: "/home/me/project" });
  const args = field("args", "Arguments", "As on a command line; quotes keep words together.", { placeholder: "--epochs 10" });
  const name = field("name", "Name", "Need not be unique; made from the script's name if empty.", { maxlength: 100 });
  const deadline = field("deadline", "Done within", "Such as 45m, 2h or 1d 6h. Empty: best effort, no promise.", { placeholder: "2h" });
  const least = field("min", "Fewest GPUs", "Usually 1.", { type: "number", min: 1, max: 65536, value: 1 });
  const most = field("max", "Most GPUs", "Empty: as many as the policy gives.", { type: "number", min: 1, max: 65536 });
  const auto = h("input", { type: "checkbox", id: "auto", change: later });
  const answer = h("div", { class: "quote", role: "status", "aria-live": "polite" });
  const go = h("button", { class: "primary" }, "Submit");
  const form = h("form", { submit: send, novalidate: true },
    h("div", { class: "fields" }, script.box, workdir.box, args.box, name.box, deadline.box, h("div", { class: "pair" }, least.box, most.box),
      h("div", { class: "field check" }, auto, h("label", { for: "auto" }, "Plain PyTorch: the script does not import swell, make it elastic"))),
    answer, h("div", { class: "buttons" }, go));
  const element = h("section", { class: "card narrow" }, h("div", { class: "head" }, h("h2", {}, "Submit a job")),
    h("p", { class: "quiet" }, "Say what and by when, never how many GPUs. The answer below follows as you type."), form);

  let timer = 0;
  let asking: AbortController | null = null;
  let key = newKey();
  let refused = false;

  function later(): void {
    key = newKey();
    clearTimeout(timer);
    timer = window.setTimeout(quote, TYPING_MS);
  }

  function say(look: string, ...parts: (Node | string)[]): void {
    answer.className = `quote ${look}`;
    answer.replaceChildren(...parts);
  }

  // The request, or null with the reason said.
  function request(): Record<string, unknown> | null {
    const path = script.input.value.trim();
    const directory = workdir.input.value.trim();
    if (!path || !directory) return say("", "Script and directory are needed first."), null;
    const within = deadline.input.value.trim();
    const seconds = within ? parseDuration(within) : null;
    if (within && seconds === null) return say("bad", `"${within}" is not a duration: write it such as 45m, 2h or 1d 6h.`), null;
    const made = path.split("/").pop()!.replace(/\.py$/, "").replace(/[^A-Za-z0-9._-]/g, "-").replace(/^[.-]+/, "") || "job";
    return {
      name: name.input.value.trim() || made.slice(0, 100),
      script: path,
      workdir: directory,
      args: words(args.input.value),
      auto: auto.checked,
      min_workers: Number(least.input.value) || 1,
      max_workers: most.input.value === "" ? null : Number(most.input.value),
      deadline_s: seconds === null ? null : Date.now() / 1000 + seconds,
    };
  }

  async function quote(): Promise<void> {
    asking?.abort();
    const body = request();
    if (!body) return;
    asking = new AbortController();
    answer.classList.add("asking");
    try {
      show(await api.post<Promised>("/v1/quote", body, {}, asking.signal));
    } catch (error) {
      if (error instanceof DOMException) return;
      refused = false;
      say("bad", error instanceof Error ? error.message : String(error));
    }
  }

  function show(promise: Promised): void {
    const now = Date.now() / 1000;
    refused = !promise.admitted;
    const estimate = promise.estimate.finish_s;
    const likely = estimate === null ? "" : `Probably done in ${duration(estimate - now)}, at ${moment(estimate)}` +
      (promise.estimate.earliest_s && promise.estimate.latest_s ? ` (between ${moment(promise.estimate.earliest_s)} and ${moment(promise.estimate.latest_s)}).` : ".");
    if (refused) return sayRefused(promise, now);
    if (promise.guaranteed_s !== null) say("good", h("strong", {}, `Promised by ${moment(promise.guaranteed_s)}. `), likely);
    else if (promise.pending) say("", h("strong", {}, "Will be profiled first. "), promise.reason);
    else say("", h("strong", {}, "Best effort. "), likely || "This script has not run here yet, so nobody can say how long it takes.", promise.reason ? ` ${promise.reason}` : "");
  }

  function sayRefused(promise: Promised, now: number): void {
    const parts: (Node | string)[] = [h("strong", {}, "That deadline cannot be promised. "), promise.reason];
    if (promise.earliest_deadline_s !== null) {
      const seconds = Math.ceil((promise.earliest_deadline_s - now) * 1.05) + 1;
      const offer = seconds < 120 ? `${seconds}s` : `${Math.ceil(seconds / 60)}m`;
      parts.push(h("p", {}, `The earliest would be in ${duration(promise.earliest_deadline_s - now)}. `,
        h("button", { type: "button", click: () => ((deadline.input.value = offer), void quote()) }, `Take it: ${offer}`)));
    }
    say("bad", ...parts);
  }

  async function send(event: Event): Promise<void> {
    event.preventDefault();
    const body = request();
    if (!body) return;
    go.disabled = true;
    try {
      const job = await api.post<Job>("/v1/jobs", body, { "Idempotency-Key": key });
      key = newKey();
      state.jobs.set(job.job_id, job);
      if (job.phase === "refused") return sayRefused(job.promise, Date.now() / 1000);
      toast(`${job.request.name} was submitted.`);
      location.hash = `#/job/${encodeURIComponent(job.job_id)}`;
    } catch (error) {
      say("bad", error instanceof Error ? error.message : String(error));
    } finally {
      go.disabled = !state.mayChange;
    }
  }

  go.disabled = !state.mayChange;
  // The last job's directory is a good guess for the next one's.
  const latest = [...state.jobs.values()].sort((a, b) => b.submitted_s - a.submitted_s)[0];
  if (latest) workdir.input.value = latest.request.workdir;
  say("", state.mayChange ? "Script and directory are needed first." : "Your token is for looking only: quotes work, submitting does not.");
  return { title: "Submit", element, update() {}, close: () => (clearTimeout(timer), asking?.abort()) };
}
