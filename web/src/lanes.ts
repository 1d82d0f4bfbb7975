// Two pictures of the same thing: who has how many GPUs over time. Above, all jobs on top of each other under
// the line of what there is; below, a lane for each job, as thick as it has GPUs.
import { colour, css, onColour, packed } from "./colours";
import { h, setText } from "./dom";
import { clock, duration, moment, plural } from "./format";
import { state } from "./state";
import type { Lane } from "./types";

const RIVER = 150;
const ROW = 26;
const LEFT = 128;
const AXIS = 22;
const GAP = 14;
const FEW = 24;
const MOST = 400;

interface Row {
  id: string;
  lane: Lane;
  held: [number, number, number][]; // from, to, GPUs, within the window
  waits: number | null; // since when it has waited for GPUs, within the window; null if it does not
  ran: number;
}

// Where the time axis begins: with the last stretch of activity. A pause of the whole cluster that is longer than
// what happened since is left out, so that idle hours do not squeeze the present.
export function beginning(spans: [number, number][], to: number): number {
  const quiet = 600;
  let from = to - 60;
  for (const [begin, end] of [...spans].sort((a, b) => b[1] - a[1])) {
    if (from - end > Math.max(quiet, to - from) && from < to - 60) break;
    from = Math.min(from, begin);
  }
  return Math.max(from - (to - from) * 0.02, to - 86400);
}

export function lanesFigure(): { element: HTMLElement; draw: () => void; drawSoon: () => void } {
  const canvas = h("canvas", { "aria-hidden": "true" });
  const tip = h("div", { class: "tip", hidden: true });
  const title = h("h2", { id: "lanes-title" }, "GPUs over time");
  const summary = h("p", { class: "quiet", id: "lanes-summary" });
  const more = h("button", { type: "button", class: "plain" }, "");
  const spans: [string, number][] = [["15 min", 900], ["1 h", 3600], ["6 h", 21600], ["24 h", 86400]];
  let span: number | null = null; // null: what fits the log
  let all = false;
  let rows: Row[] = [];
  let drawnAt = 0;
  const sheet = document.createElement("canvas");
  let from = 0;
  let to = 1;
  const choices = h("div", { class: "choices", role: "group", "aria-label": "Span of time" });
  const choose = (value: number | null) => () => {
    span = value;
    for (const one of choices.children) one.setAttribute("aria-pressed", String(one.getAttribute("data-s") === String(value)));
    draw();
  };
  choices.append(h("button", { type: "button", "data-s": "null", "aria-pressed": "true", click: choose(null) }, "Auto"));
  for (const [label, seconds] of spans)
    choices.append(h("button", { type: "button", "data-s": seconds, "aria-pressed": "false", click: choose(seconds) }, label));
  more.addEventListener("click", () => ((all = !all), draw()));

  const element = h("section", { class: "card", "aria-labelledby": "lanes-title" },
    h("div", { class: "head" }, title, choices),
    summary,
    h("figure", { class: "canvas", role: "img", "aria-labelledby": "lanes-title lanes-summary" }, canvas, tip),
    more);

  function collect(): void {
    to = Date.now() / 1000;
    const waiting = [...state.jobs.values()].filter((job) => job.phase === "queued");
    from = span === null
      ? beginning([...[...state.lanes.values()].flatMap((lane) => spansOf(lane)), ...waiting.map((job): [number, number] => [job.submitted_s, to])], to)
      : to - span;
    rows = [];
    for (const [id, lane] of state.lanes) {
      if (lane.ended_s !== null && lane.ended_s < from) continue;
      const held: Row["held"] = [];
      let ran = 0;
      for (let i = 0; i < lane.changes.length; i++) {
        const [begin, gpus] = lane.changes[i];
        const end = i + 1 < lane.changes.length ? lane.changes[i + 1][0] : lane.ended_s ?? to;
        if (gpus && end > from) {
          held.push([Math.max(begin, from), end, gpus]);
          ran += gpus * (end - Math.max(begin, from));
        }
      }
      const job = state.jobs.get(id);
      const last = lane.changes[lane.changes.length - 1];
      const waits = job?.phase === "queued" ? Math.max(last && !last[1] ? last[0] : job.submitted_s, from) : null;
      if (held.length || waits !== null) rows.push({ id, lane, held, waits, ran });
    }
    for (const job of waiting) {
      if (state.lanes.has(job.job_id)) continue;
      rows.push({ id: job.job_id, lane: { name: job.request.name, changes: [], ended_s: null }, held: [], waits: Math.max(job.submitted_s, from), ran: 0 });
    }
    rows.sort((a, b) => rank(a) - rank(b) || (a.lane.ended_s !== null ? b.lane.ended_s! - a.lane.ended_s : begun(a) - begun(b)));
  }

  function spansOf(lane: Lane): [number, number][] {
    return lane.changes.flatMap(([begin, gpus], i): [number, number][] =>
      gpus ? [[begin, i + 1 < lane.changes.length ? lane.changes[i + 1][0] : lane.ended_s ?? to]] : []);
  }

  // Jobs that run, then those that wait, then those that are over, the newest first.
  const rank = (row: Row): number => (row.lane.ended_s !== null ? 2 : row.waits !== null ? 1 : 0);
  const begun = (row: Row): number => row.lane.changes[0]?.[0] ?? row.waits ?? 0;

  function shown(): Row[] {
    if (rows.length <= FEW) return rows;
    if (all) return rows.slice(0, MOST);
    const waiting = rows.filter((row) => row.waits !== null && !row.ran).slice(0, FEW / 3);
    const most = rows.filter((row) => row.ran).sort((a, b) => b.ran - a.ran).slice(0, FEW - waiting.length);
    const kept = new Set([...waiting, ...most]);
    return rows.filter((row) => kept.has(row));
  }

  function draw(): void {
    if (!element.isConnected) return;
    drawnAt = performance.now();
    collect();
    const lanes = shown();
    const width = Math.max(canvas.parentElement!.clientWidth, 280);
    const left = width < 520 ? 84 : LEFT;
    const row = lanes.length > 60 ? 12 : ROW;
    const height = RIVER + AXIS + GAP + lanes.length * row + 4;
    const ratio = Math.min(window.devicePixelRatio || 1, lanes.length > 150 ? 1 : 2);
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    const g = canvas.getContext("2d")!;
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.clearRect(0, 0, width, height);
    const x = (time: number) => left + ((time - from) / (to - from)) * (width - left - 6);
    const [ink, quiet, rule, faint] = [css("--ink"), css("--quiet"), css("--rule"), css("--faint")];
    g.font = "12px system-ui, sans-serif";
    axis(g, x, width, left, height, quiet, rule);
    river(g, x, width, left, quiet, faint, ink);
    const most = Math.max(4, ...lanes.flatMap((one) => one.held.map(([, , gpus]) => gpus)));
    lanes.forEach((one, index) => laneRow(g, x, one, RIVER + AXIS + GAP + index * row, row, left, width, most, ink, faint));
    marks(g, x, height, left);
    const held = rows.filter((one) => one.held.length).length;
    const waiting = rows.filter((one) => one.waits !== null).length;
    setText(title, `${state.unit}s over time`);
    summary.textContent = rows.length
      ? `${plural(held, "job")} held ${state.unit}s in the last ${duration(to - from)}; ${state.used} of ${state.slots} ${state.unit}s are in use now.` +
        (waiting ? ` ${plural(waiting, "job")} ${waiting === 1 ? "waits" : "wait"}.` : "") +
        (rows.length > lanes.length ? ` Shown: the ${lanes.length} with the most ${state.unit} time, and who waits longest.` : "")
      : `No job has held a ${state.unit} yet. Submit one: swell submit train.py, or the Submit page.`;
    more.hidden = rows.length <= FEW;
    more.textContent = all ? "Show fewer lanes" : `Show ${Math.min(rows.length, MOST)} lanes`;
  }

  function axis(g: CanvasRenderingContext2D, x: (t: number) => number, width: number, left: number, height: number, quiet: string, rule: string): void {
    const steps = [5, 10, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200];
    const step = steps.find((one) => ((width - left) * one) / (to - from) >= 74) ?? 86400;
    const shift = new Date().getTimezoneOffset() * 60;
    g.textAlign = "center";
    for (let t = Math.ceil((from - shift) / step) * step + shift; t < to; t += step) {
      g.fillStyle = rule;
      g.fillRect(Math.round(x(t)), 0, 1, height);
      g.fillStyle = quiet;
      if (x(t) > left + 24 && x(t) < width - 24) g.fillText(clock(t, step), x(t), RIVER + 15);
    }
  }

  function capacityAt(time: number): number {
    let value = state.capacity.length ? state.capacity[0][1] : state.slots;
    for (const [at, gpus] of state.capacity) if (at <= time) value = gpus;
    return value;
  }

  function river(g: CanvasRenderingContext2D, x: (t: number) => number, width: number, left: number, quiet: string, faint: string, ink: string): void {
    const most = Math.max(state.slots, ...state.capacity.filter(([at]) => at >= from).map(([, gpus]) => gpus), 1);
    const y = (gpus: number) => RIVER - (gpus / most) * (RIVER - 16);
    g.fillStyle = faint;
    g.fillRect(left, y(most), width - left - 6, RIVER - y(most));
    paintStack(g, left, width - left - 6, y(most), most);
    g.strokeStyle = ink;
    g.lineWidth = 1.25;
    g.setLineDash([4, 3]);
    g.beginPath();
    let previous = y(capacityAt(from));
    g.moveTo(left, previous);
    for (const [at, gpus] of state.capacity) {
      if (at <= from) continue;
      g.lineTo(x(at), previous);
      previous = y(gpus);
      g.lineTo(x(at), previous);
    }
    g.lineTo(width - 6, previous);
    g.stroke();
    g.setLineDash([]);
    g.fillStyle = quiet;
    g.textAlign = "right";
    g.fillText(plural(most, state.unit), left - 8, y(most) + 5);
    g.fillText("0", left - 8, RIVER);
  }

  // Painted pixel by pixel: a thousand jobs cost no more than the pixels that they cover.
  function paintStack(g: CanvasRenderingContext2D, left: number, width: number, top: number, most: number): void {
    const columns = Math.max(1, Math.floor(width));
    const height = (RIVER - 16) * (most <= 256 ? 2 : 1);
    if (sheet.width !== columns || sheet.height !== height) (sheet.width = columns), (sheet.height = height);
    const to2d = sheet.getContext("2d")!;
    const image = to2d.createImageData(columns, height);
    const pixels = new Uint32Array(image.data.buffer);
    const stack = new Float64Array(columns);
    const cell = (to - from) / columns;
    const gap = most <= 64 ? 1 : 0;
    for (const row of rows) {
      const paint = packed(row.id);
      for (const [begin, end, gpus] of row.held) {
        const first = Math.max(0, Math.floor((begin - from) / cell));
        const last = Math.min(columns, Math.max(first + 1, Math.round((end - from) / cell)));
        for (let c = first; c < last; c++) {
          const low = Math.round((stack[c] / most) * height);
          stack[c] += gpus;
          const high = Math.min(Math.round((stack[c] / most) * height), height) - gap;
          for (let r = low; r < high; r++) pixels[(height - 1 - r) * columns + c] = paint;
        }
      }
    }
    to2d.putImageData(image, 0, 0);
    g.imageSmoothingEnabled = false;
    g.drawImage(sheet, left, top, width, RIVER - top);
  }

  function laneRow(g: CanvasRenderingContext2D, x: (t: number) => number, row: Row, top: number, size: number, left: number, width: number, most: number, ink: string, faint: string): void {
    // By the square root, so that one GPU is still seen beside a hundred.
    const thickness = (gpus: number) => Math.max(2, Math.sqrt(gpus / most) * (size - 3));
    const middle = top + size / 2;
    g.fillStyle = faint;
    g.fillRect(left, middle - 0.5, width - left - 6, 1);
    g.fillStyle = colour(row.id);
    for (const [begin, end, gpus] of row.held) {
      const thick = thickness(gpus);
      g.fillRect(x(begin), middle - thick / 2, Math.max(x(end) - x(begin), 1), thick);
    }
    if (row.waits !== null) waiting(g, x(row.waits), width - 6, middle, size);
    if (size < 12) return;
    g.fillStyle = ink;
    g.textAlign = "right";
    let name = row.lane.name;
    while (name.length > 3 && g.measureText(name).width > left - 18) name = `${name.slice(0, -2)}…`;
    g.fillText(name, left - 8, middle + 4);
    if (size < ROW) return;
    g.font = "600 11px system-ui, sans-serif";
    g.textAlign = "center";
    for (const [begin, end, gpus] of row.held) {
      const room = x(end) - x(begin);
      if (room < 16 || thickness(gpus) < 9) continue;
      g.fillStyle = onColour(row.id);
      g.fillText(String(gpus), (x(begin) + x(end)) / 2, middle + 4);
    }
    g.font = "12px system-ui, sans-serif";
  }

  // An empty dashed box: this job waits.
  function waiting(g: CanvasRenderingContext2D, left: number, right: number, middle: number, size: number): void {
    const [quiet, tall] = [css("--quiet"), Math.max(4, size * 0.45)];
    g.strokeStyle = g.fillStyle = quiet;
    g.lineWidth = 1;
    g.setLineDash([3, 3]);
    g.strokeRect(left + 0.5, Math.round(middle - tall / 2) + 0.5, Math.max(right - left - 1, 2), Math.round(tall));
    g.setLineDash([]);
    if (size < ROW || right - left < 60) return;
    g.font = "11px system-ui, sans-serif";
    g.textAlign = "center";
    const box = g.measureText("waits").width + 8;
    g.fillStyle = css("--card");
    g.fillRect((left + right - box) / 2, middle - tall / 2 - 1, box, tall + 3);
    g.fillStyle = quiet;
    g.fillText("waits", (left + right) / 2, middle + 4);
    g.font = "12px system-ui, sans-serif";
  }

  function marks(g: CanvasRenderingContext2D, x: (t: number) => number, height: number, left: number): void {
    const bad = css("--bad");
    for (const [time, kind] of state.marks) {
      if (time < from || kind === "node_joined") continue;
      g.fillStyle = bad;
      const at = Math.max(x(time), left);
      g.fillRect(at - 0.5, 4, 1, height - 4);
      g.beginPath();
      g.moveTo(at - 5, 0);
      g.lineTo(at + 5, 0);
      g.lineTo(at, 8);
      g.fill();
    }
  }

  // At once when the card gets its width, which may be after the first drawing.
  new ResizeObserver(() => canvas.parentElement!.clientWidth && draw()).observe(canvas.parentElement!);
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const left = box.width < 520 ? 84 : LEFT;
    const time = from + ((event.clientX - box.left - left) / (box.width - left - 6)) * (to - from);
    const lanes = shown();
    const size = lanes.length > 60 ? 12 : ROW;
    const row = lanes[Math.floor((event.clientY - box.top - RIVER - AXIS - GAP) / size)];
    if (time < from || time > to || (!row && event.clientY - box.top > RIVER)) return void (tip.hidden = true);
    const at = (one: Row) => one.held.find(([a, b]) => a <= time && time < b)?.[2] ?? 0;
    if (row) tip.textContent = `${row.lane.name}: ${row.waits !== null && time >= row.waits ? "waits" : plural(at(row), state.unit)} at ${moment(time)}`;
    else {
      const holders = rows.map((one) => [one.lane.name, at(one)] as const).filter(([, gpus]) => gpus);
      const used = holders.reduce((sum, [, gpus]) => sum + gpus, 0);
      const names = holders.sort((a, b) => b[1] - a[1]).slice(0, 6).map(([name, gpus]) => `${name} ${gpus}`).join(", ");
      const near = state.marks.find(([t, kind]) => kind !== "node_joined" && Math.abs(t - time) < (to - from) / 150);
      tip.textContent = `${moment(time)}: ${used} of ${capacityAt(time)} ${state.unit}s${names ? ` (${names})` : ""}` +
        (near ? ` – ${near[1].replace("_", " ")}: ${near[2]}` : "");
    }
    canvas.style.cursor = row ? "pointer" : "default";
    tip.hidden = false;
    tip.style.left = `${Math.min(event.clientX - box.left + 12, box.width - tip.offsetWidth - 4)}px`;
    tip.style.top = `${event.clientY - box.top + 16}px`;
  });
  canvas.addEventListener("pointerleave", () => (tip.hidden = true));
  canvas.addEventListener("click", (event) => {
    const lanes = shown();
    const size = lanes.length > 60 ? 12 : ROW;
    const row = lanes[Math.floor((event.clientY - canvas.getBoundingClientRect().top - RIVER - AXIS - GAP) / size)];
    if (row) location.hash = `#/job/${encodeURIComponent(row.id)}`;
  });
  // With many jobs once a second is enough; with few every change is shown at once.
  const drawSoon = () => (performance.now() - drawnAt > (rows.length > 50 ? 950 : 150) ? draw() : undefined);
  return { element, draw, drawSoon };
}
