import * as api from "../api";
import type { Curve, Mark } from "../charts";
import { curve, Group, speedFigure, viewOptions } from "../charts";
import { line } from "../colours";
import { confirmed, h, setText, toast } from "../dom";
import { duration, moment, number, percent, plural } from "../format";
import { state } from "../state";
import { classPill, NO_TEAM } from "../teams";
import type { Explanation, Job, LogEvent, Series } from "../types";
import { over } from "../types";
import { confinement, outlook, phasePill } from "./queue";
import type { View } from "./view";

const CHANGES = ["allocated", "resized", "preempted", "worker_lost", "checkpoint_saved"];
const LOG_CHARS = 400_000;
const EXPLAIN_MS = 4000;

export function jobView(jobId: string): View {
  const path = `/v1/jobs/${encodeURIComponent(jobId)}`;
  const stopper = new AbortController();
  const title = h("h2", {}, jobId);
  const pill = h("span", {});
  const about = h("p", { class: "quiet mono" });
  const why = h("p", { class: "why" });
  const facts = h("dl", { class: "tiles small" });
  const actions = h("div", { class: "buttons" });
  const curves = h("div", { class: "curves" });
  const group: Group = new Group("job", () => view.update());
  const view = viewOptions(group);
  const speed = speedFigure();
  const changeRows = h("tbody", {});
  const output = h("pre", { class: "log", tabindex: 0, role: "log", "aria-label": "Output of the job", "aria-live": "off" });
  const find = h("input", { type: "search", placeholder: "Find in the output", "aria-label": "Find in the output", input: () => showOutput() });
  const found = h("span", { class: "quiet", role: "status" });
  const element = h("div", {},
    h("section", { class: "card" },
      h("div", { class: "head" }, h("div", { class: "title" }, title, pill), actions), about, why, facts),
    h("section", { class: "card", "aria-label": "Curves" }, h("div", { class: "head" }, h("div", { class: "title" }, h("h2", {}, "Over time"), h("span", { class: "quiet" }, "stripes: resizes and their pauses")), view.element), curves),
    h("div", { class: "two" },
      h("section", { class: "card", "aria-label": "Speed" }, speed.element),
      h("section", { class: "card" }, h("div", { class: "head" }, h("h2", {}, "What happened to it")),
        h("div", { class: "scroll short", tabindex: 0, role: "region", "aria-label": "Changes" }, h("table", {},
          h("thead", {}, h("tr", {}, ...["When", "What", "GPUs", "Pause"].map((one) => h("th", { scope: "col" }, one)))), changeRows)))),
    h("section", { class: "card" }, h("div", { class: "head" }, h("h2", {}, "Output"),
      h("div", { class: "choices" }, find, found, h("button", { type: "button", click: download }, "Download"))), output));

  let written = ""; // all of the output that is kept; what is shown may be only the lines with what is looked for
  let series: Series = { time_s: [], curves: {}, metrics: {}, changes: [] };
  let explained: Explanation | null = null;
  let explainAt = 0;
  let drawnActions = "";
  let drawnPhase = "";
  const plots = new Map<string, Curve>();

  const job = (): Job | undefined => state.jobs.get(jobId);

  async function load(): Promise<void> {
    try {
      if (!job()) state.jobs.set(jobId, await api.get<Job>(path, stopper.signal));
      series = await api.get<Series>(`${path}/series`, stopper.signal);
      await explain();
      draw();
    } catch (error) {
      if (stopper.signal.aborted) return;
      if (error instanceof api.Refusal && error.status === 404) return unknown();
      setText(why, error instanceof Error ? error.message : String(error));
    }
  }

  function unknown(): void {
    stopper.abort();
    element.replaceChildren(h("section", { class: "card narrow" }, h("h2", {}, "There is no such job"),
      h("p", {}, `'${jobId}' is not a job of this platform, or not one that you may see. `, h("a", { href: "#/queue" }, "All jobs"), ".")));
  }

  async function explain(): Promise<void> {
    explainAt = Date.now() + EXPLAIN_MS;
    explained = await api.get<Explanation>(`${path}/explain`, stopper.signal);
  }

  // -- output: follows, also over a restart of the server ------------------------------------------------

  async function followOutput(): Promise<void> {
    let offset = 0;
    const decoder = new TextDecoder();
    while (!stopper.signal.aborted) {
      try {
        const answer = await api.send("GET", `${path}/logs?follow=true&offset=${offset}`, undefined, {}, stopper.signal);
        const reader = answer.body!.getReader();
        for (let part = await reader.read(); !part.done; part = await reader.read()) {
          offset += part.value.length;
          write(decoder.decode(part.value, { stream: true }));
        }
        const now = job();
        if (now && over(now)) return;
      } catch (error) {
        if (error instanceof api.Refusal && error.status !== 429 && error.status < 500) return;
      }
      await api.pause(1000, stopper.signal);
    }
  }

  function write(text: string): void {
    const atEnd = output.scrollTop + output.clientHeight >= output.scrollHeight - 24;
    written += text;
    const cut = written.length > LOG_CHARS;
    if (cut) written = written.slice(written.indexOf("\n", written.length - LOG_CHARS / 2) + 1);
    if (cut || find.value) showOutput();
    else output.append(document.createTextNode(text));
    if (atEnd) output.scrollTop = output.scrollHeight;
  }

  function showOutput(): void {
    const wanted = find.value.toLowerCase();
    const lines = wanted ? written.split("\n").filter((one) => one.toLowerCase().includes(wanted)) : [];
    output.textContent = wanted ? lines.join("\n") : written;
    setText(found, wanted ? plural(lines.length, "line") : "");
  }

  // All of it, also what is no longer shown here.
  async function download(): Promise<void> {
    try {
      const parts: Uint8Array<ArrayBuffer>[] = [];
      for (let offset = 0; ; ) {
        const answer = await api.send("GET", `${path}/logs?limit=1048576&offset=${offset}`, undefined, {}, stopper.signal);
        const part = new Uint8Array(await answer.arrayBuffer());
        if (!part.length) break;
        parts.push(part);
        offset = Number(answer.headers.get("X-Next-Offset") ?? offset + part.length);
      }
      const address = URL.createObjectURL(new Blob(parts, { type: "text/plain" }));
      h("a", { href: address, download: `${jobId}.log` }).click();
      setTimeout(() => URL.revokeObjectURL(address), 10_000);
    } catch (error) {
      toast(error instanceof Error ? error.message : String(error), true);
    }
  }

  // -- drawing -------------------------------------------------------------------------------------------

  const marks = (): Mark[] =>
    series.changes
      .filter((one) => ["resized", "preempted", "worker_lost"].includes(one.kind))
      .map((one) => ({ time: one.time_s, pause: Number(one.pause_s ?? 0), bad: one.kind !== "resized" }));

  function plot(name: string, unit: string, index: number, options = {}): Curve {
    let found = plots.get(name);
    if (!found) {
      plots.set(name, (found = curve(name, unit, line(index), group, marks, options)));
      curves.append(found.element);
    }
    return found;
  }

  function goodput(): (number | null)[] {
    const done = series.curves.done ?? [];
    const width = 3;
    return done.map((value, i) => {
      const before = Math.max(0, i - width);
      const start = done[before];
      const dt = series.time_s[i] - series.time_s[before];
      return value === null || start === null || dt <= 0 ? null : Math.max(0, (value - start) / dt);
    });
  }

  function measured(): Map<number, number> {
    const done = series.curves.done ?? [];
    const workers = series.curves.workers ?? [];
    const sums = new Map<number, [number, number]>();
    for (let i = 1; i < done.length; i++) {
      const count = workers[i];
      if (count === null || count !== workers[i - 1] || done[i] === null || done[i - 1] === null) continue;
      const [a, b] = [series.time_s[i - 1], series.time_s[i]];
      if (series.changes.some((one) => one.kind !== "checkpoint_saved" && one.time_s > a && one.time_s - Number(one.pause_s ?? 0) < b)) continue;
      const sum = sums.get(count) ?? [0, 0];
      sums.set(count, [sum[0] + done[i]! - done[i - 1]!, sum[1] + b - a]);
    }
    return new Map([...sums].filter(([, [, seconds]]) => seconds > 0).map(([count, [steps, seconds]]) => [count, steps / seconds]));
  }

  function drawCurves(now: Job): void {
    const to = now.ended_s ?? Date.now() / 1000;
    const from = now.started_s ?? now.submitted_s;
    const gpus = series.changes.filter((one) => ["allocated", "resized", "preempted"].includes(one.kind));
    if (gpus.length) {
      const counts = gpus.map((one) => (one.gpus ?? []).length as number);
      plot("GPUs", " GPUs", 0, { stepped: true, zero: true }).set([[...gpus.map((one) => one.time_s), to], [...counts, over(now) ? 0 : counts[counts.length - 1]]], from, to);
    }
    const named: [string, string, (number | null)[] | undefined, object][] = [
      ["Loss", "", series.curves.loss, { smooth: true }],
      ...Object.keys(series.metrics).filter((name) => name !== "loss").slice(0, 4).map((name): [string, string, (number | null)[], object] => [name, "", series.metrics[name], { smooth: true }]),
      ["Goodput", " it/s", goodput(), { zero: true }],
      ["Batch size", "", series.curves.batch_size, { stepped: true, zero: true }],
      ["Learning rate", "", series.curves.lr, { zero: true }],
      ["Statistical efficiency", "", series.curves.efficiency, { zero: true }],
      ["Gradient noise scale", "", series.curves.noise_scale, { zero: true }],
    ];
    named.forEach(([name, unit, values, options], index) => {
      if (values?.some((one) => one !== null)) plot(name, unit, index + 1, options).set([series.time_s, values], from, to);
    });
    if (!plots.size) curves.textContent = "Nothing reported yet: curves appear with the job's first steps.";
    else if (curves.firstChild instanceof Text) curves.firstChild.remove();
    const told = new Map((explained?.measured ?? []).map((one) => [one.workers, one.rate]));
    speed.set(explained?.curve ?? null, explained?.steps ?? [], told.size ? told : measured());
  }

  const fact = (name: string, value: string, look = "") => h("div", {}, h("dt", {}, name), h("dd", { class: look }, value));

  function draw(): void {
    const now = job();
    if (!now) return;
    const clock = Date.now() / 1000;
    setText(title, now.request.name);
    if (drawnPhase !== now.phase) {
      drawnPhase = now.phase;
      pill.replaceChildren(phasePill(now.phase), " ", classPill(now) ?? "");
    }
    setText(about, `${now.owner} · ${now.job_id} · ${[now.request.script, ...now.request.args].join(" ")}`);
    const reason = over(now) ? now.reason : explained?.why ?? now.reason;
    setText(why, reason === now.phase || !reason ? confinement(now) : reason);
    const rate = state.rate(now);
    const [promise, look] = outlook(now, clock);
    const share = now.of ? `${percent(Math.min(now.done / now.of, 1))} · ${number(now.done)} of ${number(now.of)}` : now.done ? number(now.done) : "–";
    const team = explained?.team;
    facts.replaceChildren(
      fact("GPUs", over(now) ? "–" : `${now.wanted.length} (${now.request.min_workers} to ${now.request.max_workers ?? "any"})`),
      ...(confinement(now) ? [fact("confined to", plural(now.most_workers ?? 1, "worker"))] : []),
      ...(team ? [fact("team", (team.name || NO_TEAM) + (over(now) ? "" : ` · has ${plural(team.used, "slot")}${team.borrowed ? `, ${team.borrowed} borrowed` : ""}`))] : []),
      fact("progress", share),
      fact("goodput", rate === null ? "–" : `${number(rate)} it/s`),
      fact("promise and prediction", promise, look),
      fact("resizes", now.resizes ? `${now.resizes}, ${duration(now.pause_s / now.resizes)} each` : "none"),
      fact(over(now) ? "took" : "since", over(now) && now.ended_s ? duration(now.ended_s - now.submitted_s) : moment(now.submitted_s)),
    );
    drawActions(now);
    drawCurves(now);
    changeRows.replaceChildren(...series.changes.slice(-200).reverse().map((one) => h("tr", {},
      h("td", {}, moment(one.time_s)),
      h("td", {}, one.kind === "checkpoint_saved" ? `checkpoint at step ${one.step}` : one.kind.replace("_", " ") + (one.reason ? `: ${one.reason}` : "")),
      h("td", { class: "number" }, one.gpus ? (one.before ? `${one.before.length} → ${one.gpus.length}` : String(one.gpus.length)) : one.before ? `${one.before.length} → 0` : ""),
      h("td", { class: "number" }, one.pause_s === undefined ? "" : duration(one.pause_s)))));
    if (!series.changes.length) changeRows.replaceChildren(h("tr", {}, h("td", { colspan: 4, class: "quiet" }, "Nothing yet.")));
  }

  // -- what people can do to it --------------------------------------------------------------------------

  async function act(what: string, body?: unknown): Promise<void> {
    try {
      state.jobs.set(jobId, await api.post<Job>(`${path}/${what}`, body));
      draw();
    } catch (error) {
      toast(error instanceof Error ? error.message : String(error), true);
    }
  }

  function drawActions(now: Job): void {
    const key = `${now.phase} ${now.request.min_workers} ${now.request.max_workers}`;
    if (key === drawnActions) return;
    drawnActions = key;
    actions.replaceChildren();
    if (over(now) || !state.mayChange) return;
    const name = now.request.name;
    if (now.phase === "paused") actions.append(h("button", { type: "button", click: () => act("resume") }, "Resume"));
    else actions.append(h("button", { type: "button", click: async () => {
      if (await confirmed(`Pause ${name}?`, "It saves its state and gives its GPUs back until it is resumed. A promised finish may be missed.", "Pause")) await act("pause");
    } }, "Pause"));
    actions.append(
      h("button", { type: "button", click: () => askBounds(now) }, "Bounds"),
      h("button", { type: "button", class: "danger", click: async () => {
        if (await confirmed(`Cancel ${name}?`, "It ends for good. What it has saved stays on disk.", "Cancel the job", true)) await act("cancel");
      } }, "Cancel"));
  }

  function askBounds(now: Job): void {
    const least = h("input", { type: "number", min: 1, max: 65536, value: now.request.min_workers, required: true });
    const most = h("input", { type: "number", min: 1, max: now.most_workers ?? 65536, value: now.request.max_workers ?? "", placeholder: "any" });
    const dialog = h("dialog", { "aria-labelledby": "bounds" });
    const close = () => (dialog.close(), dialog.remove());
    dialog.append(h("form", { method: "dialog", submit: async (event: Event) => {
      event.preventDefault();
      close();
      await act("scale", { min_workers: Number(least.value), max_workers: most.value === "" ? null : Number(most.value) });
    } },
      h("h2", { id: "bounds" }, `Bounds for ${now.request.name}`),
      h("p", {}, "The policy decides between these. Running jobs are resized at once, without stopping."),
      h("label", {}, "Fewest GPUs ", least), h("label", {}, "Most GPUs ", most),
      h("div", { class: "buttons" }, h("button", { type: "button", click: close }, "Back"), h("button", { class: "primary" }, "Set"))));
    document.body.append(dialog);
    dialog.showModal();
  }

  // -- events --------------------------------------------------------------------------------------------

  function take(event: LogEvent): void {
    if (event.kind === "progress") {
      const before = series.time_s.length;
      if (before && series.time_s[before - 1] >= event.time_s) return;
      series.time_s.push(event.time_s);
      const { metrics, ...values } = event.data as { metrics?: Record<string, number> };
      extend(series.curves, values, before);
      extend(series.metrics, metrics ?? {}, before);
    } else if (CHANGES.includes(event.kind)) {
      const last = series.changes[series.changes.length - 1];
      if (!last || last.time_s < event.time_s) series.changes.push({ ...event.data, time_s: event.time_s, kind: event.kind });
    }
  }

  function extend(columns: Record<string, (number | null)[]>, values: Record<string, unknown>, before: number): void {
    for (const name of Object.keys(values)) columns[name] ??= new Array(before).fill(null);
    for (const [name, column] of Object.entries(columns)) {
      const value = values[name];
      column.push(typeof value === "number" && Number.isFinite(value) ? value : null);
    }
  }

  void load();
  void followOutput();

  return {
    title: jobId,
    element,
    update(events) {
      const own = events.filter((event) => event.job_id === jobId);
      own.forEach(take);
      const now = job();
      if (own.some((event) => event.kind !== "progress") || (now && !over(now) && Date.now() > explainAt && own.length)) {
        explainAt = Date.now() + EXPLAIN_MS;
        explain().then(draw, () => {});
      }
      draw();
    },
    close() {
      stopper.abort();
      for (const one of plots.values()) one.close();
      speed.close();
    },
  };
}

