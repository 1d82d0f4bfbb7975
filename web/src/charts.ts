// Curves on a time axis, drawn by uPlot. Each is a figure with a sentence that says the same in words. The curves of
// one group share cursor and zoom: dragging over one of them zooms all, a double click shows everything again.
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { css } from "./colours";
import { h, setText } from "./dom";
import { clock, moment, number } from "./format";

export type Points = [number[], (number | null)[]];
export interface Mark {
  time: number;
  pause: number;
  bad: boolean;
}

// What the curves of one page share, and how people look at them.
export class Group {
  zoom: [number, number] | null = null;
  smoothing = 0; // 0: as measured; towards 1: an ever longer running mean
  log = false;
  private redraws = new Set<(again: boolean) => void>();

  constructor(readonly key: string, readonly onZoom: () => void = () => {}) {}

  join(redraw: (again: boolean) => void): () => void {
    this.redraws.add(redraw);
    return () => this.redraws.delete(redraw);
  }

  setZoom(zoom: [number, number] | null): void {
    this.zoom = zoom;
    for (const redraw of this.redraws) redraw(false);
    this.onZoom();
  }

  // Draw all curves anew, after smoothing or scale have changed.
  again(): void {
    for (const redraw of this.redraws) redraw(true);
  }
}

export interface Line {
  label: string;
  colour: string;
  values: (number | null)[];
}

export interface Curve {
  element: HTMLElement;
  set(points: Points, from: number, to: number): void;
  setLines(times: number[], lines: Line[], from: number, to: number): void;
  close(): void;
}

interface Options {
  stepped?: boolean;
  zero?: boolean;
  smooth?: boolean; // follows the group's smoothing and scale
  elapsed?: (value: number) => string; // the x axis is not the clock: how its values are said
  seconds?: boolean; // and they are seconds
  height?: number;
}

const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];
const axisStyle = () => ({ stroke: css("--quiet"), grid: { stroke: css("--rule"), width: 1 }, ticks: { stroke: css("--rule"), width: 1 }, font: "11px system-ui, sans-serif" });

// A running mean that forgets, without the lag at its beginning.
export function smoothed(values: (number | null)[], share: number): (number | null)[] {
  let sum = 0;
  let weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = share * sum + (1 - share) * value;
    weight = share * weight + (1 - share);
    return sum / weight;
  });
}

export function curve(title: string, unit: string, colour: string, group: Group, marks: () => Mark[], options: Options = {}): Curve {
  const words = h("figcaption", {});
  const box = h("div", { "aria-hidden": "true" });
  const value = h("span", { class: "value" });
  const element = h("figure", { class: "curve" }, h("div", { class: "head" }, h("h3", {}, title), value), box, words);
  const height = options.height ?? 132;
  let plot: uPlot | null = null;
  let range: [number, number] = [0, 1];
  let size = 0;
  let times: number[] = [];
  let drawn: Line[] = [];

  // Each line, and behind a smoothed one what was measured.
  function layers(): (Line & { faint: boolean })[] {
    if (!options.smooth || !group.smoothing) return drawn.map((one) => ({ ...one, faint: false }));
    return drawn.flatMap((one) => [{ ...one, faint: true }, { ...one, values: smoothed(one.values, group.smoothing), faint: false }]);
  }

  function make(all: (Line & { faint: boolean })[]): uPlot {
    const logarithmic = !!options.smooth && group.log && drawn.every((one) => one.values.every((value) => value === null || value > 0));
    const say = options.elapsed ?? moment;
    return new uPlot(
      {
        width: box.clientWidth || 320,
        height,
        legend: { show: false },
        cursor: { sync: { key: group.key, setSeries: false, scales: ["x", null] }, y: false, drag: { x: true, y: false, setScale: false } },
        scales: {
          x: { time: !options.elapsed, range: () => group.zoom ?? range },
          y: logarithmic ? { distr: 3 } : { range: (_, low, high) => {
            if (options.zero) return [0, (high || 1) * 1.12];
            const pad = (high - low || Math.abs(high) || 1) * 0.1;
            return [low - pad, high + pad];
          } },
        },
        axes: [
          { ...axisStyle(), size: 30, space: 54, ...(options.elapsed ? { incrs: options.seconds ? STEPS : undefined, values: (_: uPlot, splits: number[]) => splits.map((one) => say(one)) } : { incrs: STEPS, values: (_: uPlot, splits: number[], __: number, ___: number, step: number) => splits.map((one) => clock(one, step)) }) },
          { ...axisStyle(), size: 52, values: (_, splits) => splits.map((one) => (one === null ? "" : number(one))) },
        ],
        series: [
          {},
          ...all.map((one) => ({
            stroke: one.faint ? `${one.colour}55` : one.colour,
            width: one.faint ? 1 : 2,
            spanGaps: true,
            points: { show: !one.faint && times.length < 3 },
            fill: options.stepped && all.length === 1 ? `${one.colour}40` : undefined,
            paths: options.stepped ? uPlot.paths.stepped!({ align: 1 }) : uPlot.paths.linear!(),
          })),
        ],
        hooks: {
          drawClear: [(u) => drawMarks(u, marks())],
          setSelect: [(u) => {
            if (u.select.width < 6) return;
            const ends: [number, number] = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
            u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
            group.setZoom(ends);
          }],
          ready: [(u) => u.over.addEventListener("dblclick", () => group.setZoom(null))],
          setCursor: [(u) => {
            const index = u.cursor.idx;
            if (index === null || index === undefined || u.cursor.left! < 0) return setText(value, "");
            const said = all.map((one, i) => [one, u.data[i + 1][index]] as const).filter(([one, at]) => !one.faint && at !== null && at !== undefined);
            const numbers = said.map(([one, at]) => (drawn.length > 1 ? `${one.label} ` : "") + number(at as number)).join(", ");
            setText(value, numbers ? `${numbers}${unit} at ${say(u.data[0][index])}` : "");
          }],
        },
      },
      [times, ...all.map((one) => one.values)] as uPlot.AlignedData,
      box,
    );
  }

  function drawMarks(u: uPlot, all: Mark[]): void {
    const g = u.ctx;
    g.save();
    g.beginPath();
    g.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
    g.clip();
    for (const mark of all) {
      const at = u.valToPos(mark.time, "x", true);
      const began = u.valToPos(mark.time - mark.pause, "x", true);
      g.fillStyle = css(mark.bad ? "--bad" : "--mark");
      g.globalAlpha = 0.28;
      g.fillRect(began, u.bbox.top, Math.max(at - began, 1), u.bbox.height);
      g.globalAlpha = 0.9;
      g.fillRect(at, u.bbox.top, 1, u.bbox.height);
    }
    g.restore();
  }

  function draw(again = false): void {
    if (!element.isConnected || !drawn.length) return;
    const all = layers();
    if (plot && (again || plot.series.length !== all.length + 1)) {
      plot.destroy();
      plot = null;
    }
    if (!plot) plot = make(all);
    else plot.setData([times, ...all.map((one) => one.values)] as uPlot.AlignedData);
    if (box.clientWidth && box.clientWidth !== size) {
      size = box.clientWidth;
      plot.setSize({ width: size, height });
    }
  }

  function inWords(): string {
    const parts = drawn.map((one) => {
      const seen = one.values.filter((value): value is number => value !== null);
      if (!seen.length) return "";
      const [least, most] = [seen.reduce((a, b) => Math.min(a, b)), seen.reduce((a, b) => Math.max(a, b))];
      const name = drawn.length > 1 ? `${one.label}: ` : "";
      return `${name}${number(seen[0])} at first, ${number(seen[seen.length - 1])} now; between ${number(least)} and ${number(most)}${unit}.`;
    });
    return parts.filter(Boolean).join(" ") || "Nothing reported yet.";
  }

  const leave = group.join(draw);
  const setLines: Curve["setLines"] = (at, lines, from, to) => {
    range = [from, Math.max(to, from + 1)];
    times = at;
    drawn = lines;
    setText(words, inWords());
    draw();
  };
  return {
    element,
    set: (points, from, to) => setLines(points[0], [{ label: title, colour, values: points[1] }], from, to),
    setLines,
    close() {
      leave();
      plot?.destroy();
    },
  };
}

// Choices of smoothing, scale and zoom for the curves of a group.
export function viewOptions(group: Group): { element: HTMLElement; update(): void } {
  const smoothing = h("select", { "aria-label": "Smoothing", change: () => ((group.smoothing = Number(smoothing.value)), group.again()) },
    ...([["0", "as measured"], ["0.6", "smoothed"], ["0.9", "smoothed much"]] as const).map(([value, text]) => h("option", { value }, text)));
  const log = h("input", { type: "checkbox", change: () => ((group.log = log.checked), group.again()) });
  const all = h("button", { type: "button", hidden: true, click: () => group.setZoom(null) }, "Show all");
  const hint = h("span", { class: "quiet wide-only" }, "drag to zoom");
  const element = h("div", { class: "choices" }, hint, all, smoothing, h("label", { class: "inline" }, log, "log scale"));
  return {
    element,
    update() {
      all.hidden = group.zoom === null;
      hint.hidden = group.zoom !== null;
    },
  };
}

export interface Step {
  nodes: number;
  workers: number;
  local_batch: number;
  step_s: number;
  rate: number;
  reports: number;
}

// A job's fitted speed for every number of GPUs, with what was measured. Not on a time axis.
export function speedFigure(): { element: HTMLElement; set(curve: number[] | null, steps: Step[], measured: Map<number, number>): void; close(): void } {
  const words = h("figcaption", {});
  const box = h("div", { "aria-hidden": "true" });
  const key = h("p", { class: "keys", "aria-hidden": "true" },
    h("span", { class: "key-line" }), "model", h("span", { class: "key-ring" }), "step times it was fitted on", h("span", { class: "key-dot" }), "progress of whole stretches");
  const element = h("figure", { class: "curve" }, h("div", { class: "head" }, h("h3", {}, "Speed by number of GPUs")), key, box, words);
  let plot: uPlot | null = null;
  let most = 2;
  return {
    element,
    set(curve, steps, measured) {
      const fitted = new Map<number, number>(); // the best batch of each number of GPUs
      for (const step of steps) fitted.set(step.workers, Math.max(fitted.get(step.workers) ?? 0, step.rate));
      most = Math.max(...measured.keys(), ...fitted.keys(), curve ? curve.length - 1 : 0, 2);
      const xs = Array.from({ length: most }, (_, i) => i + 1);
      const data = [xs, xs.map((x) => curve?.[x] ?? null), xs.map((x) => fitted.get(x) ?? null), xs.map((x) => measured.get(x) ?? null)] as uPlot.AlignedData;
      const told = [...measured].sort(([a], [b]) => a - b).map(([gpus, rate]) => `${number(rate)} on ${gpus}`).join(", ");
      const timed = steps.slice(0, 6).map((step) => `${number(step.step_s)} s on ${step.workers}${step.nodes > 1 ? ` of ${step.nodes} nodes` : ""} at ${step.local_batch} samples each`).join(", ");
      setText(words, (told ? `Measured by this job, in iterations a second: ${told}.` : "Not measured yet.") +
        (timed ? ` Steps took ${timed}.` : "") + (curve ? " The policy plans with the model." : ""));
      if (!element.isConnected) return;
      if (plot) return void plot.setData(data);
      const dots = (colour: string, filled: boolean) => ({ stroke: colour, width: 0, paths: () => null, points: { show: true, size: filled ? 8 : 12, width: 2, stroke: colour, fill: filled ? colour : "transparent" } });
      plot = new uPlot(
        {
          width: box.clientWidth || 320,
          height: 170,
          legend: { show: false },
          cursor: { y: false, drag: { x: false, y: false } },
          scales: { x: { time: false, range: () => [0.5, most + 0.5] }, y: { range: (_, __, high) => [0, (high || 1) * 1.12] } },
          axes: [{ ...axisStyle(), size: 30, incrs: [1, 2, 4, 8, 16, 32, 64, 128, 256] }, { ...axisStyle(), size: 52, values: (_, splits) => splits.map((one) => number(one)) }],
          series: [{}, { stroke: css("--accent"), width: 2, points: { show: false } }, dots(css("--mark"), false), dots(css("--second"), true)],
        },
        data,
        box,
      );
    },
    close: () => plot?.destroy(),
  };
}
