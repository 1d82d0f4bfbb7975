import * as api from "../api";
import type { Curve, Line } from "../charts";
import { curve, Group, viewOptions } from "../charts";
import { line, sideBySide } from "../colours";
import { h, setText } from "../dom";
import { duration, number, percent } from "../format";
import { state } from "../state";
import type { Job, Series } from "../types";
import { over } from "../types";
import { outlook, phasePill } from "./queue";
import type { View } from "./view";

const AGAIN_MS = 3000;
const POINTS_MOST = 600;

// Several jobs over each other: what one would otherwise open several windows for.
export function compareView(ids: string[]): View {
  const stopper = new AbortController();
  const group: Group = new Group("compare", () => options.update());
  const options = viewOptions(group);
  const all = new Map<string, Series>();
  const plots = new Map<string, Curve>();
  const rows = h("tbody", {});
  const note = h("p", { class: "bad", role: "status" });
  const axis = h("select", { "aria-label": "Horizontal axis", change: () => { group.zoom = null; for (const one of plots.values()) one.close(); plots.clear(); curves.replaceChildren(); draw(); } },
    h("option", { value: "time" }, "by time since the start"), h("option", { value: "done" }, "by iterations"));
  const curves = h("div", { class: "curves large" });
  const element = h("div", {},
    h("section", { class: "card" }, h("div", { class: "head" }, h("h2", {}, `${ids.length} jobs side by side`)), note,
      h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ...["Job", "State", "GPUs", "Progress", "Last loss", "Goodput", "Resizes", "Promise and prediction"].map((one) => h("th", { scope: "col" }, one)))), rows))),
    h("section", { class: "card", "aria-label": "Curves" }, h("div", { class: "head" }, h("div", { class: "title" }, h("h2", {}, "Curves"), axis), options.element), curves));
  let readAt = 0;
  let stale = new Set(ids);
  let colours = sideBySide(ids);

  const name = (id: string): string => state.jobs.get(id)?.request.name ?? id;

  async function read(): Promise<void> {
    readAt = Date.now();
    const wanted = [...stale];
    stale = new Set();
    const done = await Promise.allSettled(wanted.map(async (id) => {
      const path = `/v1/jobs/${encodeURIComponent(id)}`;
      if (!state.jobs.has(id)) state.jobs.set(id, await api.get<Job>(path, stopper.signal));
      all.set(id, await api.get<Series>(`${path}/series`, stopper.signal));
    }));
    if (stopper.signal.aborted) return;
    const failed = done.filter((one): one is PromiseRejectedResult => one.status === "rejected");
    setText(note, failed.map((one) => (one.reason instanceof Error ? one.reason.message : String(one.reason))).join("; "));
    draw();
  }

  // A job's values along the chosen axis; at most some hundred points each.
  function along(id: string, values: (number | null)[] | undefined): [number, number][] {
    const series = all.get(id);
    if (!series || !values) return [];
    const start = state.jobs.get(id)?.started_s ?? series.time_s[0] ?? 0;
    const xs = axis.value === "done" ? series.curves.done ?? [] : series.time_s.map((time) => time - start);
    const step = Math.ceil(values.length / POINTS_MOST);
    return values.map((value, i) => [xs[i], value] as const).filter((one, i): one is [number, number] => i % step === 0 && one[0] !== null && one[0] !== undefined && one[1] !== null);
  }

  // How many GPUs a job had: by time from its starts, resizes and preemptions, so that waiting shows as none.
  function gpus(id: string): [number, number][] {
    const series = all.get(id);
    if (!series || axis.value === "done") return along(id, series?.curves.workers);
    const job = state.jobs.get(id);
    const changes = series.changes.filter((one) => ["allocated", "resized", "preempted"].includes(one.kind));
    if (!changes.length) return [];
    const start = job?.started_s ?? changes[0].time_s;
    const points = changes.map((one): [number, number] => [one.time_s - start, (one.gpus ?? []).length as number]);
    const last = points[points.length - 1][1];
    return [...points, [(job?.ended_s ?? Date.now() / 1000) - start, job && over(job) ? 0 : last]];
  }

  function goodput(series: Series): (number | null)[] {
    const done = series.curves.done ?? [];
    return done.map((value, i) => {
      const before = Math.max(0, i - 3);
      const dt = series.time_s[i] - series.time_s[before];
      return value === null || done[before] === null || dt <= 0 ? null : Math.max(0, (value - done[before]!) / dt);
    });
  }

  function draw(): void {
    const now = Date.now() / 1000;
    colours = sideBySide(ids);
    rows.replaceChildren(...ids.map((id, index) => {
      const job = state.jobs.get(id);
      const swatch = h("span", { class: "swatch" });
      swatch.style.backgroundColor = colours[index];
      const losses = (all.get(id)?.curves.loss ?? []).filter((one): one is number => one !== null);
      const rate = job ? state.rate(job) : null;
      const [text, look] = job ? outlook(job, now) : ["", ""];
      return h("tr", {}, h("th", { scope: "row" }, swatch, h("a", { href: `#/job/${encodeURIComponent(id)}` }, name(id))),
        h("td", {}, job ? phasePill(job.phase) : ""), h("td", { class: "number" }, job && !over(job) ? job.wanted.length : ""),
        h("td", { class: "number" }, job?.of ? percent(Math.min(job.done / job.of, 1)) : "–"), h("td", { class: "number" }, losses.length ? number(losses[losses.length - 1]) : "–"),
        h("td", { class: "number" }, rate === null ? "–" : `${number(rate)} it/s`), h("td", { class: "number" }, job?.resizes ?? ""), h("td", { class: look }, text));
    }));
    const metrics = [...new Set([...all.values()].flatMap((series) => Object.keys(series.metrics)))].filter((one) => one !== "loss").slice(0, 4);
    const wanted: [string, string, (series: Series) => (number | null)[] | undefined, object][] = [
      ["Loss", "", (series) => series.curves.loss, { smooth: true }],
      ...metrics.map((metric): [string, string, (series: Series) => (number | null)[] | undefined, object] => [metric, "", (series) => series.metrics[metric], { smooth: true }]),
      ["GPUs", " GPUs", (series) => series.curves.workers, { stepped: true, zero: true }],
      ["Goodput", " it/s", goodput, { zero: true }],
      ["Batch size", "", (series) => series.curves.batch_size, { stepped: true, zero: true }],
    ];
    for (const [title, unit, values, looks] of wanted) show(title, unit, values, looks);
    if (!plots.size) curves.textContent = "Nothing reported yet.";
    else if (curves.firstChild instanceof Text) curves.firstChild.remove();
  }

  function show(title: string, unit: string, values: (series: Series) => (number | null)[] | undefined, looks: object): void {
    const points = ids.map((id) => (!all.has(id) ? [] : title === "GPUs" ? gpus(id) : along(id, values(all.get(id)!))));
    if (!points.some((one) => one.length)) return;
    const xs = [...new Set(points.flatMap((one) => one.map(([x]) => x)))].sort((a, b) => a - b);
    const lines = points.map((one, index): Line => {
      const known = new Map(one);
      return { label: name(ids[index]), colour: colours[index], values: xs.map((x) => known.get(x) ?? null) };
    });
    let plot = plots.get(title);
    if (!plot) {
      const say = axis.value === "done" ? number : duration;
      plots.set(title, (plot = curve(title, unit, line(0), group, () => [], { ...looks, elapsed: say, seconds: axis.value === "time", height: 200 })));
      curves.append(plot.element);
    }
    plot.setLines(xs, lines, xs[0] ?? 0, xs[xs.length - 1] ?? 1);
  }

  void read();
  return {
    title: "Compare",
    element,
    update(events) {
      for (const event of events) if (event.job_id !== null && ids.includes(event.job_id)) stale.add(event.job_id);
      if (stale.size && Date.now() - readAt > AGAIN_MS) void read();
    },
    tick() {
      if (stale.size && Date.now() - readAt > AGAIN_MS) void read();
    },
    close() {
      stopper.abort();
      for (const one of plots.values()) one.close();
    },
  };
}
