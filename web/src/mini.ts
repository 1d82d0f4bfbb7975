// A small picture of one run: a lane for each job, as thick as it has GPUs. SVG, so that it is sharp on any screen.
import { apart, line } from "./colours";
import { h } from "./dom";
import { duration, plural } from "./format";

export interface MiniLane {
  name: string;
  changes: [number, number][]; // seconds from the first submission on, and GPUs from then on
}

const WIDTH = 560;
const SVG = "http://www.w3.org/2000/svg";

function part(tag: string, attributes: Record<string, string | number>, text?: string): SVGElement {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  if (text !== undefined) element.textContent = text;
  return element;
}

// A span of time for all pictures; one that takes very long is cut off rather than making the others tiny.
export function spanOf(runs: MiniLane[][]): number {
  const ends = runs.map((lanes) => Math.max(...lanes.flatMap((lane) => lane.changes.map(([time]) => time)), 1)).sort((a, b) => a - b);
  return Math.min(ends[ends.length - 1], 2.2 * ends[Math.floor((ends.length - 1) / 2)]);
}

export function miniLanes(title: string, lanes: MiniLane[], span: number): HTMLElement {
  const row = Math.min(16, Math.max(3, 320 / lanes.length));
  const height = row * lanes.length + 18;
  const most = Math.max(...lanes.flatMap((lane) => lane.changes.map(([, gpus]) => gpus)), 1);
  const x = (seconds: number) => (seconds / span) * WIDTH;
  const drawn = part("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": `${title}: GPUs of ${plural(lanes.length, "job")} over ${duration(span)}`, class: "mini" });
  const ended = lanes.map((lane) => (lane.changes.length ? lane.changes[lane.changes.length - 1][0] : 0));
  // By place, so that a job has the same colour under every policy.
  const colours = apart(lanes.map((_, index) => [String(index), index, index + 6]));
  lanes.forEach((lane, index) => {
    const middle = row * (index + 0.5);
    lane.changes.forEach(([begin, gpus], at) => {
      const end = Math.min(lane.changes[at + 1]?.[0] ?? span, span);
      if (!gpus || end <= begin) return;
      const thick = Math.max(1.5, Math.sqrt(gpus / most) * (row - 1));
      const bar = part("rect", { x: x(begin).toFixed(1), y: (middle - thick / 2).toFixed(1), width: Math.max(x(end) - x(begin), 0.8).toFixed(1), height: thick.toFixed(1), fill: line(colours.get(String(index))!) });
      bar.append(part("title", {}, `${lane.name}: ${plural(gpus, "GPU")} for ${duration(end - begin)}`));
      drawn.append(bar);
    });
  });
  const last = Math.max(...ended);
  const at = Math.min(x(last), WIDTH - 2);
  if (last <= span) drawn.append(part("rect", { x: at.toFixed(1), y: 0, width: 1, height: height - 16, class: "over" }));
  drawn.append(part("text", { x: at.toFixed(1), y: height - 3, "text-anchor": at > WIDTH / 2 ? "end" : "start" }, `all done after ${duration(last)}${last > span ? " →" : ""}`));
  return h("figure", {}, h("h3", {}, title), drawn as unknown as HTMLElement);
}
