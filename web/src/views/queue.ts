import { colour } from "../colours";
import { h, setText } from "../dom";
import { duration, moment, number, percent, plural } from "../format";
import { state } from "../state";
import { classPill, teamOf } from "../teams";
import type { Job } from "../types";
import { over } from "../types";
import type { View } from "./view";

const PAGE = 50;
const ORDER: Record<string, number> = { running: 0, queued: 1, paused: 2 };
export const MARKS: Record<string, string> = { running: "▶", queued: "…", paused: "‖", finished: "✓", failed: "✗", cancelled: "–", refused: "⊘" };

export function phasePill(phase: string): HTMLElement {
  return h("span", { class: `pill ${phase}` }, h("span", { "aria-hidden": "true" }, `${MARKS[phase] ?? "?"} `), phase);
}

// Promise against prediction, in words: will it make it, by how much?
export function outlook(job: Job, now: number): [string, string] {
  const promised = job.promise.guaranteed_s ?? job.request.deadline_s;
  if (job.phase === "refused") return [job.promise.earliest_deadline_s ? `would need until ${moment(job.promise.earliest_deadline_s)}` : "refused", "bad"];
  if (job.ended_s !== null) {
    if (job.phase !== "finished" || promised === null) return [`${job.phase} ${duration(now - job.ended_s)} ago`, ""];
    return job.ended_s <= promised ? [`kept, ${duration(promised - job.ended_s)} early`, "good"] : [`late by ${duration(job.ended_s - promised)}`, "bad"];
  }
  if (job.promise.pending) return ["being profiled", ""];
  const finish = state.predicted(job, now);
  if (promised === null) return finish === null ? ["no estimate yet", ""] : [`about ${moment(finish)}`, ""];
  if (finish === null) return [`by ${moment(promised)}`, ""];
  const slack = promised - finish;
  const word = job.promise.guaranteed_s === null ? "deadline" : "promised";
  return slack >= 0 ? [`${word} ${moment(promised)}, ${duration(slack)} to spare`, "good"] : [`${word} ${moment(promised)}, ${duration(slack)} late at this speed`, "bad"];
}

// How many GPUs a job can use and why no more, if its script cannot be shared; otherwise nothing.
export function confinement(job: Job): string {
  return job.confined && !over(job) ? `at most ${plural(job.most_workers ?? 1, "worker")}: ${job.confined}` : "";
}

export function whyWaits(job: Job): string {
  if (job.phase === "queued") return job.reason || `${state.used} of ${state.slots} slots are in use, as policy '${state.policy}' decides`;
  if (job.phase === "running") return job.reason || confinement(job);
  return job.reason.trim().replace(/\s+/g, " ");
}

const PHASES = ["all", "active", "running", "queued", "paused", "finished", "failed", "cancelled", "refused"];
const COMPARED_MOST = 8;

// Columns, and what they are sorted by: numbers descending at first, texts ascending.
const COLUMNS: [string, ((job: Job, now: number) => number | string) | null][] = [
  ["Job", (job) => job.request.name.toLowerCase()],
  ["State", null],
  ["Workers", (job) => job.wanted.length],
  ["Progress", (job) => (job.phase === "finished" ? 1 : job.of ? job.done / job.of : 0)],
  ["Goodput", (job) => state.rate(job) ?? -1],
  ["Promise and prediction", (job, now) => -((job.promise.guaranteed_s ?? job.request.deadline_s ?? Infinity) - (state.predicted(job, now) ?? 0))],
  ["Why", null],
];

// What is looked at is part of the address, so that it can be sent to somebody: #/queue?phase=failed&find=bert
function asked(): URLSearchParams {
  return new URLSearchParams(location.hash.split("?")[1] ?? "");
}

export function queueView(): View {
  let page = 0;
  let filter = (asked().get("find") ?? "").toLowerCase();
  let which = PHASES.includes(asked().get("phase") ?? "") ? asked().get("phase")! : "all";
  let sorted: [number, number] | null = null; // column, and 1 or -1
  const chosen = new Set<string>();
  const keep = () => {
    const wanted = new URLSearchParams([...(which === "all" ? [] : [["phase", which]]), ...(filter ? [["find", filter]] : [])]);
    history.replaceState(null, "", `#/queue${[...wanted].length ? `?${wanted}` : ""}`);
    page = 0;
    draw();
  };
  const search = h("input", { type: "search", size: 24, placeholder: "Name, owner, team or id", "aria-label": "Filter jobs", value: filter, input: () => ((filter = search.value.toLowerCase()), keep()) });
  const phases = h("select", { "aria-label": "Phase", change: () => ((which = phases.value), keep()) },
    ...PHASES.map((one) => h("option", { value: one, selected: one === which }, one)));
  const compare = h("button", { type: "button", hidden: true, click: () => (location.hash = `#/compare/${[...chosen].map(encodeURIComponent).join(",")}`) });
  const heads = COLUMNS.map(([name, by], index) => h("th", { scope: "col" }, by
    ? h("button", { type: "button", class: "sort", click: () => sortBy(index) }, name) : name));

  function sortBy(index: number): void {
    const first = index === 0 ? 1 : -1;
    sorted = sorted?.[0] !== index ? [index, first] : sorted[1] === first ? [index, -first] : null;
    heads.forEach((head, i) => (sorted?.[0] === i ? head.setAttribute("aria-sort", sorted[1] > 0 ? "ascending" : "descending") : head.removeAttribute("aria-sort")));
    draw();
  }

  function choose(id: string, yes: boolean): void {
    if (yes) chosen.add(id);
    else chosen.delete(id);
    compare.hidden = chosen.size < 2;
    compare.disabled = chosen.size > COMPARED_MOST;
    setText(compare, chosen.size > COMPARED_MOST ? `At most ${COMPARED_MOST} can be compared` : `Compare ${chosen.size} jobs`);
  }
  const count = h("span", { class: "quiet", role: "status" });
  const body = h("tbody", {});
  const back = h("button", { type: "button", click: () => (page--, draw()) }, "Back");
  const next = h("button", { type: "button", click: () => (page++, draw()) }, "More");
  const place = h("span", { class: "quiet" });
  const pager = h("div", { class: "buttons" }, back, place, next);
  const table = h("table", { class: "jobs" },
    h("caption", { class: "hidden" }, "Jobs, those that run first"),
    h("thead", {}, h("tr", {}, ...heads)),
    body);
  const element = h("section", { class: "card" },
    h("div", { class: "head" }, h("h2", {}, "Jobs"), h("div", { class: "choices" }, compare, search, phases, count)),
    h("div", { class: "scroll" }, table), pager);
  let shown: string[] = [];
  let drawnAt = 0;
  const rows = new Map<string, ReturnType<typeof makeRow>>();

  function makeRow(job: Job) {
    const swatch = h("span", { class: "swatch" });
    const link = h("a", { href: `#/job/${encodeURIComponent(job.job_id)}` }, job.request.name);
    const pill = h("td", {});
    const gpus = h("td", { class: "number", "data-label": "workers" });
    const fill = h("span", {});
    const share = h("span", { class: "share" });
    const rate = h("td", { class: "number", "data-label": "goodput" });
    const promise = h("td", {});
    const owner = h("small", {});
    const why = h("div", { class: "why" });
    const line = h("tr", {},
      h("th", { scope: "row" },
        h("input", { type: "checkbox", checked: chosen.has(job.job_id), "aria-label": `Compare ${job.request.name}`, change: (event: Event) => choose(job.job_id, (event.target as HTMLInputElement).checked) }),
        swatch, link, owner, classPill(job)),
      pill, gpus, h("td", {}, h("div", { class: "bar", "aria-hidden": "true" }, fill), share), rate, promise, h("td", {}, why));
    return { line, swatch, look: "", pill, gpus, fill, share, rate, promise, owner, why, phase: "" };
  }

  function fillRow(row: ReturnType<typeof makeRow>, job: Job, now: number): void {
    const own = colour(job.job_id);
    if (row.look !== own) row.swatch.style.backgroundColor = row.look = own;
    if (row.phase !== job.phase) {
      row.phase = job.phase;
      row.pill.replaceChildren(phasePill(job.phase));
    }
    const team = teamOf(job);
    setText(row.owner, ` ${job.owner}${team ? ` · team ${team}` : ""} `);
    setText(row.gpus, over(job) ? "" : String(job.wanted.length));
    const share = job.phase === "finished" ? 1 : job.of ? Math.min(job.done / job.of, 1) : null;
    row.fill.style.width = `${(share ?? 0) * 100}%`;
    setText(row.share, share === null ? (job.done ? `${number(job.done)} it` : "–") : percent(share));
    const rate = state.rate(job);
    setText(row.rate, rate === null ? "–" : `${number(rate)} it/s`);
    const [text, look] = outlook(job, now);
    setText(row.promise, text);
    row.promise.className = look;
    setText(row.why, whyWaits(job));
  }

  // With many jobs once a second is enough.
  const drawSoon = () => {
    if (performance.now() - drawnAt > (state.jobs.size > 500 ? 950 : 150)) draw();
  };

  function draw(): void {
    drawnAt = performance.now();
    const now = Date.now() / 1000;
    let found = [...state.jobs.values()];
    if (which === "active") found = found.filter((job) => !over(job));
    else if (which !== "all") found = found.filter((job) => job.phase === which);
    if (filter) found = found.filter((job) => `${job.request.name} ${job.owner} ${teamOf(job)} ${job.job_id}`.toLowerCase().includes(filter));
    const by = sorted && COLUMNS[sorted[0]][1];
    if (by) {
      const keys = new Map(found.map((job) => [job, by(job, now)]));
      const way = sorted![1];
      found.sort((a, b) => (keys.get(a)! < keys.get(b)! ? -way : keys.get(a)! > keys.get(b)! ? way : 0));
    } else found.sort((a, b) => (ORDER[a.phase] ?? 3) - (ORDER[b.phase] ?? 3) || (over(a) ? (b.ended_s ?? 0) - (a.ended_s ?? 0) : a.submitted_s - b.submitted_s));
    const pages = Math.max(1, Math.ceil(found.length / PAGE));
    page = Math.min(Math.max(page, 0), pages - 1);
    const part = found.slice(page * PAGE, (page + 1) * PAGE);
    setText(count, plural(found.length, "job"));
    const ids = part.map((job) => job.job_id);
    for (const job of part) {
      let row = rows.get(job.job_id);
      if (!row) rows.set(job.job_id, (row = makeRow(job)));
      fillRow(row, job, now);
    }
    if (ids.join() !== shown.join()) {
      shown = ids;
      // Only rows that are elsewhere are moved: laying a table out is what takes time.
      ids.forEach((id, index) => {
        const line = rows.get(id)!.line;
        if (body.children[index] !== line) body.insertBefore(line, body.children[index] ?? null);
      });
      while (body.children.length > ids.length) body.lastElementChild!.remove();
      for (const id of rows.keys()) if (!ids.includes(id)) rows.delete(id);
    }
    if (!part.length) {
      const nothing = state.jobs.size ? "No job matches." : "No jobs yet: submit one on the Submit page, or with swell submit train.py.";
      body.replaceChildren(h("tr", {}, h("td", { colspan: 7, class: "quiet" }, nothing)));
      shown = [];
    }
    pager.hidden = pages === 1;
    back.disabled = page === 0;
    next.disabled = page === pages - 1;
    setText(place, `page ${page + 1} of ${pages}`);
  }

  return { title: "Queue", element, update: drawSoon, tick: drawSoon };
}
