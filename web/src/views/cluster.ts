import { colour } from "../colours";
import { confirmed, h, setText, toast } from "../dom";
import * as api from "../api";
import { sign, words } from "../events";
import { duration, moment, number, percent, plural } from "../format";
import { lanesFigure } from "../lanes";
import { state } from "../state";
import { teamsCard } from "../teams";
import type { Job } from "../types";
import { over } from "../types";
import type { View } from "./view";

export function clusterView(): View {
  const lanes = lanesFigure();
  const tiles = h("dl", { class: "tiles" });
  const figures = new Map<string, HTMLElement>();
  const notes = new Map<string, HTMLElement>();
  const inUse = h("dt", {}, "GPUs in use");
  for (const name of ["in use", "running", "waiting", "goodput", "promises", "policy"]) {
    const value = h("dd", {}, "–");
    const note = h("dd", { class: "note" });
    figures.set(name, value);
    notes.set(name, note);
    tiles.append(h("div", {}, name === "in use" ? inUse : h("dt", {}, name), value, note));
  }
  const grid = h("ul", { class: "nodes" });
  const legend = h("ul", { class: "legend", "aria-label": "Jobs that run here" });
  const gridCard = h("section", { class: "card", "aria-labelledby": "nodes-title" },
    h("div", { class: "head" }, h("h2", { id: "nodes-title" }, "Nodes")), grid, legend);
  const happened = h("ol", { class: "feed" });
  const feedCard = h("section", { class: "card", "aria-labelledby": "feed-title" },
    h("div", { class: "head" }, h("h2", { id: "feed-title" }, "What happened")),
    h("div", { class: "scroll short", tabindex: 0, role: "log", "aria-live": "off", "aria-label": "Events, newest first" }, happened));
  const teams = teamsCard();
  const element = h("div", {}, tiles, lanes.element, teams.element, h("div", { class: "wide-two" }, gridCard, feedCard));

  let layout = "";
  let cells: HTMLElement[] = [];
  let looks: string[] = [];
  let cards: { card: HTMLElement; note: HTMLElement; drain: HTMLButtonElement }[] = [];
  let newest = -1;
  let drawnVersion = -1;
  let paintedAt = -Infinity;

  function build(): void {
    const wanted = state.nodes.map((node) => `${node.name}:${node.gpus}`).join();
    if (wanted === layout) return;
    layout = wanted;
    cells = [];
    looks = [];
    cards = [];
    grid.replaceChildren();
    const dense = state.slots > 128;
    grid.classList.toggle("dense", dense);
    for (const node of state.nodes) {
      const box = h("div", { class: "gpus", "aria-hidden": "true" });
      for (let i = 0; i < node.gpus; i++) {
        const cell = h("span", {});
        cells.push(cell);
        box.append(cell);
      }
      const note = h("span", { class: "note" });
      const drain = h("button", { type: "button", class: "plain drain", hidden: state.who.role !== "admin" || dense, click: () => void askDrain(node.name) });
      const card = h("li", {}, h("div", { class: "name" }, h("strong", {}, node.name), h("span", {}, drain, note)), box);
      cards.push({ card, note, drain });
      grid.append(card);
    }
  }

  // What `swell drain` does.
  async function askDrain(name: string): Promise<void> {
    const node = state.nodes.find((one) => one.name === name);
    if (!node) return;
    const verb = node.draining ? "undrain" : "drain";
    if (!node.draining && !(await confirmed(`Drain ${name}?`, "Its jobs move to other nodes without stopping, and it gets no more until it is used again.", "Drain"))) return;
    try {
      state.nodes = (await api.post<{ nodes: typeof state.nodes }>(`/v1/nodes/${encodeURIComponent(name)}/${verb}`)).nodes;
      drawnVersion = -1;
      draw();
    } catch (error) {
      toast(error instanceof Error ? error.message : String(error), true);
    }
  }

  function tellEvents(): void {
    const last = (state.recent[state.recent.length - 1]?.seq ?? 0) + state.recent.length;
    if (last === newest) return;
    newest = last;
    const shown = state.recent.filter((event) => event.kind !== "admitted" || event.data.finish_s).sort((a, b) => a.time_s - b.time_s).slice(-60).reverse();
    happened.replaceChildren(...shown.map((event) => {
      const [mark, look] = sign(event);
      const about = event.job_id === null
        ? h("strong", {}, event.node ?? "")
        : h("a", { href: `#/job/${encodeURIComponent(event.job_id)}` }, state.jobs.get(event.job_id)?.request.name ?? state.lanes.get(event.job_id)?.name ?? event.data.name ?? event.job_id);
      return h("li", {}, h("time", { class: "quiet" }, moment(event.time_s)), h("span", { class: `sign ${look}`, "aria-hidden": "true" }, mark), h("span", {}, about, ` ${words(event)}`));
    }));
    if (!shown.length) happened.replaceChildren(h("li", { class: "quiet" }, "Nothing yet."));
  }

  function paint(): void {
    const holder: (Job | undefined)[] = [];
    for (const job of state.jobs.values()) if (!over(job)) for (const slot of job.wanted) holder[slot] = job;
    let first = 0;
    state.nodes.forEach((node, index) => {
      const counts = new Map<string, number>();
      for (let slot = first; slot < first + node.gpus; slot++) {
        const job = holder[slot];
        const cell = cells[slot];
        const look = job ? colour(job.job_id) : "";
        const shown = job ? look + job.job_id : "";
        if (looks[slot] !== shown) {
          looks[slot] = shown;
          cell.style.backgroundColor = look;
          cell.title = `${state.unit} ${slot}: ${job ? job.request.name : "free"}`;
          cell.classList.toggle("used", !!job);
        }
        if (job) counts.set(job.request.name, (counts.get(job.request.name) ?? 0) + 1);
      }
      first += node.gpus;
      const { card, note, drain } = cards[index];
      const verb = node.draining ? "Use again" : "Drain";
      if (drain.textContent !== verb) {
        setText(drain, verb);
        drain.setAttribute("aria-label", `${verb}: ${node.name}`);
      }
      const seen = [...counts.values()].reduce((sum, one) => sum + one, 0);
      const others = Math.max(node.used - seen, 0);
      const stateText = !node.up ? "lost" : node.draining ? "draining" : `${Math.max(node.used, seen)}/${node.gpus}`;
      setText(note, stateText + (node.held ? `, ${node.held} taken` : "") + (others ? `, ${others} others'` : ""));
      card.classList.toggle("lost", !node.up);
      card.classList.toggle("draining", node.draining);
      const jobs = [...counts].map(([name, count]) => `${name} ${count}`).join(", ");
      const label = `${node.name}, ${node.gpu_type}: ${stateText}${jobs ? `, held by ${jobs}` : ""}`;
      if (card.getAttribute("aria-label") !== label) card.setAttribute("aria-label", label);
    });
    const running = [...state.jobs.values()].filter((job) => job.wanted.length && !over(job)).sort((a, b) => a.submitted_s - b.submitted_s);
    const few = running.slice(0, 24);
    legend.replaceChildren(...few.map((job) => {
      const swatch = h("span", { class: "swatch" });
      swatch.style.backgroundColor = colour(job.job_id);
      return h("li", {}, swatch, h("a", { href: `#/job/${encodeURIComponent(job.job_id)}` }, job.request.name), ` ${job.wanted.length}`);
    }));
    if (running.length > few.length) legend.append(h("li", { class: "quiet" }, `and ${running.length - few.length} more`));
  }

  function tell(): void {
    const jobs = [...state.jobs.values()];
    const running = jobs.filter((job) => job.phase === "running");
    const now = Date.now() / 1000;
    const tile = (name: string, value: string, note: string, look = "") => {
      setText(figures.get(name)!, value);
      setText(notes.get(name)!, note);
      figures.get(name)!.className = look;
    };
    setText(inUse, `${state.unit}s in use`);
    tile("in use", `${state.used} of ${state.slots}`, state.slots ? percent(state.used / state.slots) : "no node is up");
    const resizing = running.filter((job) => job.resizes).length;
    tile("running", plural(running.length, "job"), resizing ? `${resizing} have been resized` : "");
    const waiting = jobs.filter((job) => job.phase === "queued");
    const oldest = waiting.reduce((first, job) => Math.min(first, job.submitted_s), now);
    tile("waiting", plural(waiting.length, "job"), waiting.length ? `the oldest for ${duration(now - oldest)}` : "");
    const rates = running.map((job) => state.rate(job)).filter((rate): rate is number => rate !== null);
    tile("goodput", rates.length ? `${number(rates.reduce((a, b) => a + b, 0))} it/s` : "–", "sum over the running jobs");
    const promised = jobs.filter((job) => !over(job) && job.promise.guaranteed_s !== null);
    const slacks = promised.map((job) => job.promise.guaranteed_s! - (state.predicted(job, now) ?? job.promise.guaranteed_s!));
    const late = slacks.filter((slack) => slack < 0).length;
    const least = slacks.length ? Math.min(...slacks) : 0;
    tile("promises", !promised.length ? "none open" : late ? `${late} of ${promised.length} at risk` : `${promised.length} on time`,
      promised.length ? (late ? `the latest by ${duration(least)}` : `${duration(least)} to spare at least`) : "", late ? "bad" : "");
    tile("policy", state.policy, "");
  }

  function draw(): void {
    // With many jobs once a second is enough.
    if (performance.now() - paintedAt > (state.jobs.size > 500 ? 950 : 150) && state.version !== drawnVersion) {
      paintedAt = performance.now();
      drawnVersion = state.version;
      build();
      paint();
      tell();
      teams.draw();
      tellEvents();
    }
    lanes.drawSoon();
  }

  return {
    title: "Cluster",
    element,
    update() {
      draw();
    },
    tick: draw,
  };
}
