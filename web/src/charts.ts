// Curves on a time axis, drawn by uPlot. Each is a figure with a sentence that says the same in words.
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

export interface Curve {
  element: HTMLElement;
  set(points: Points, from: number, to: number): void;
  close(): void;
}

const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];
const axisStyle = () => ({ stroke: css("--quiet"), grid: { stroke: css("--rule"), width: 1 }, ticks: { stroke: css("--rule"), width: 1 }, font: "11px system-ui, sans-serif" });

export function curve(title: string, unit: string, colour: string, marks: () => Mark[], options: { stepped?: boolean; zero?: boolean; log?: boolean } = {}): Curve {
  const words = h("figcaption", {});
  const box = h("div", { "aria-hidden": "true" });
  const value = h("span", { class: "value" });
  const element = h("figure", { class: "curve" }, h("div", { class: "head" }, h("h3", {}, title), value), box, words);
  let plot: uPlot | null = null;
  let range: [number, number] = [0, 1];
  let size = 0;

  function make(points: Points): uPlot {
    return new uPlot(
      {
        width: box.clientWidth || 320,
        height: 132,
        legend: { show: false },
        cursor: { sync: { key: "job", setSeries: false, scales: ["x", null] }, y: false, drag: { x: false, y: false } },
        scales: { x: { time: true, range: () => range }, y: { range: (_, low, high) => {
          if (options.zero) return [0, (high || 1) * 1.12];
          const pad = (high - low || Math.abs(high) || 1) * 0.1;
          return [low - pad, high + pad];
        } } },
        axes: [{ ...axisStyle(), size: 30, space: 44, incrs: STEPS, values: (_, splits, __, ___, step) => splits.map((one) => clock(one, step)) }, { ...axisStyle(), size: 52, values: (_, splits) => splits.map((one) => number(one)) }],
        series: [
          {},
          {
            stroke: colour,
            width: 2,
            spanGaps: true,
            points: { show: points[0].length < 3 },
            fill: options.stepped ? `${colour}40` : undefined,
            paths: options.stepped ? uPlot.paths.stepped!({ align: 1 }) : uPlot.paths.linear!(),
          },
        ],
        hooks: {
          drawClear: [(u) => drawMarks(u, marks())],
          setCursor: [(u) => {
            const index = u.cursor.idx;
            const at = index === null || index === undefined ? null : u.data[1][index];
            setText(value, at === null || at === undefined ? "" : `${number(at as number)}${unit} at ${moment(u.data[0][index!])}`);
          }],
        },
      },
      points as uPlot.AlignedData,
      box,
    );
  }

  function drawMarks(u: uPlot, all: Mark[]): void {
    const g = u.ctx;
    g.save();
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

  return {
    element,
    set(points, from, to) {
      range = [from, Math.max(to, from + 1)];
      const seen = points[1].filter((one): one is number => one !== null);
      const few = seen.length
        ? `${number(seen[0])} at first, ${number(seen[seen.length - 1])} now; between ${number(seen.reduce((a, b) => Math.min(a, b)))} and ${number(seen.reduce((a, b) => Math.max(a, b)))}${unit}.`
        : "Nothing reported yet.";
      setText(words, few);
      if (!element.isConnected) return;
      if (!plot) plot = make(points);
      else plot.setData(points as uPlot.AlignedData);
      if (box.clientWidth && box.clientWidth !== size) {
        size = box.clientWidth;
        plot.setSize({ width: size, height: 132 });
      }
    },
    close: () => plot?.destroy(),
  };
}

// A job's fitted speed for every number of GPUs, with what was measured. Not on a time axis.
export function speedFigure(): { element: HTMLElement; set(curve: number[] | null, measured: Map<number, number>): void; close(): void } {
  const words = h("figcaption", {});
  const box = h("div", { "aria-hidden": "true" });
  const element = h("figure", { class: "curve" }, h("div", { class: "head" }, h("h3", {}, "Speed by number of GPUs")), box, words);
  let plot: uPlot | null = null;
  return {
    element,
    set(curve, measured) {
      const most = Math.max(...measured.keys(), curve ? curve.length - 1 : 0, 2);
      const xs = Array.from({ length: most }, (_, i) => i + 1);
      const data = [xs, xs.map((x) => curve?.[x] ?? null), xs.map((x) => measured.get(x) ?? null)] as uPlot.AlignedData;
      const told = [...measured].sort(([a], [b]) => a - b).map(([gpus, rate]) => `${number(rate)} on ${gpus}`).join(", ");
      setText(words, (told ? `Measured, in iterations a second: ${told}.` : "Not measured yet.") + (curve ? " Line: the model that the policy plans with." : ""));
      if (!element.isConnected) return;
      if (plot) return void plot.setData(data);
      plot = new uPlot(
        {
          width: box.clientWidth || 320,
          height: 170,
          legend: { show: false },
          cursor: { y: false, drag: { x: false, y: false } },
          scales: { x: { time: false, range: () => [0.5, (plot?.data[0].length ?? most) + 0.5] }, y: { range: (_, __, high) => [0, (high || 1) * 1.12] } },
          axes: [{ ...axisStyle(), size: 30, incrs: [1, 2, 4, 8, 16, 32, 64, 128, 256] }, { ...axisStyle(), size: 52, values: (_, splits) => splits.map((one) => number(one)) }],
          series: [{}, { stroke: css("--accent"), width: 2, points: { show: false } }, { stroke: css("--second"), width: 0, paths: () => null, points: { show: true, size: 9, fill: css("--second") } }],
        },
        data,
        box,
      );
    },
    close: () => plot?.destroy(),
  };
}
