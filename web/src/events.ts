// Events in words.
import { duration, moment } from "./format";
import type { LogEvent } from "./types";

const gpus = (count: number): string => `${count} GPU${count === 1 ? "" : "s"}`;

export function words(event: LogEvent): string {
  const data = event.data;
  const [before, after] = [data.before?.length ?? 0, data.gpus?.length ?? 0];
  const why = data.reason ? `: ${data.reason}` : "";
  switch (event.kind) {
    case "submitted": return "was submitted" + (data.deadline_s ? `, to be done by ${moment(data.deadline_s)}` : "");
    case "admitted": return data.finish_s ? `is promised by ${moment(data.finish_s)}` : "is admitted";
    case "rejected": return `was refused${why}`;
    case "allocated": return `starts on ${gpus(after)}`;
    case "resized": return `${after >= before ? "swells" : "ebbs"} from ${before} to ${gpus(after)}${data.pause_s ? `, ${duration(data.pause_s)} pause` : ""}${why}`;
    case "preempted": return `gives its ${gpus(before)} back${why}`;
    case "worker_lost": return `lost a worker${why}`;
    case "noticed": return data.text ?? "noticed something";
    case "checkpoint_saved": return `saved a checkpoint at step ${data.step ?? "?"}`;
    case "finished": return `finished after ${duration(data.jct_s ?? 0)}${data.met === true ? ", its deadline met" : data.met === false ? ", its deadline missed" : ""}`;
    case "failed": return `failed${why.split("\n").pop()}`;
    case "cancelled": return "was cancelled";
    case "node_joined": return data.gpus ? `joined with ${gpus(data.gpus)}` : "joined";
    case "node_lost": return "was lost";
    case "node_slow": return `is slow: new workers there are ${(data.times ?? 1).toFixed(1)} times slower too`;
    default: return event.kind.replace(/_/g, " ");
  }
}

// How an event is marked: a sign that says it without colour, and the colour's name.
export function sign(event: LogEvent): [string, string] {
  if (["failed", "rejected", "worker_lost", "node_lost"].includes(event.kind)) return ["✗", "bad"];
  if (event.kind === "finished") return event.data.met === false ? ["✗", "bad"] : ["✓", "good"];
  if (event.kind === "resized") return [(event.data.gpus?.length ?? 0) >= (event.data.before?.length ?? 0) ? "▲" : "▼", ""];
  return [{ allocated: "▶", submitted: "+", preempted: "‖", node_joined: "+", cancelled: "–" }[event.kind] ?? "·", ""];
}
