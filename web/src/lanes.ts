// Two pictures of the same thing: who has how many GPUs over time. Above, all jobs on top of each other under
// the line of what there is; below, a lane for each job, as thick as it has GPUs.
import { colour, css, onColour, packed } from "./colours";
import { h } from "./dom";
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
  ran: number;
}

export function lanesFigure(): { element: HTMLElement; draw: () => void; drawSoon: () => void } {
  const canvas = h("canvas", { "aria-hidden": "true" });
  const tip = h("div", { class: "tip", hidden: true });
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
    h("div", { class: "head" }, h("h2", { id: "lanes-title" }, "GPUs over time"), choices),
    summary,
    h("figure", { class: "canvas", role: "img", "aria-labelledby": "lanes-title lanes-summary" }, canvas, tip),
    more);

  function collect(): void {
    to = Date.now() / 1000;
    let first = to - 60;
    for (const lane of state.lanes.values()) if (lane.changes.length) first = Math.min(first, lane.changes[0][0]);
    // Without activity for long, show what happened last.
    from = span === null ? Math.max(first - (to - first) * 0.02, to - 86400) : to - span;
    if (span === null) {
      const recent = [...state.lanes.values()].filter((lane) => (lane.ended_s ?? to) > to - 3600);
      if (recent.length) from = Math.max(from, Math.min(...recent.map((lane) => lane.changes[0]?.[0] ?? to)) - 5, to - 6 * 3600);
    }
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
      if (held.length) rows.push({ id, lane, held, ran });
    }
    rows.sort((a, b) => a.lane.changes[0][0] - b.lane.changes[0][0]);
  }

  function shown(): Row[] {
    if (rows.length <= FEW) return rows;
    if (all) return rows.slice(-MOST);
    const kept = new Set([...rows].sort((a, b) => b.ran - a.ran).slice(0, FEW));
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
    const most = Math.max(4, ...lanes.map((one) => Math.max(...one.held.map(([, , gpus]) => gpus))));
    lanes.forEach((one, index) => laneRow(g, x, one, RIVER + AXIS + GAP + index * row, row, left, width, most, ink, faint));
    marks(g, x, height, left);
    const peak = rows.length;
    summary.textContent = peak
      ? `${plural(peak, "job")} held GPUs in the last ${duration(to - from)}; ${state.used} of ${state.slots} GPUs are in use now.` +
        (rows.length > lanes.length ? ` Shown: the ${lanes.length} with the most GPU time.` : "")
      : "No job has held a GPU yet. Hand one in: swell submit train.py, or the Submit page.";
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
    g.fillText(`${most} GPUs`, left - 8, y(most) + 5);
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
    if (row) tip.textContent = `${row.lane.name}: ${plural(at(row), "GPU")} at ${moment(time)}`;
    else {
      const holders = rows.map((one) => [one.lane.name, at(one)] as const).filter(([, gpus]) => gpus);
      const used = holders.reduce((sum, [, gpus]) => sum + gpus, 0);
      const names = holders.sort((a, b) => b[1] - a[1]).slice(0, 6).map(([name, gpus]) => `${name} ${gpus}`).join(", ");
      const near = state.marks.find(([t, kind]) => kind !== "node_joined" && Math.abs(t - time) < (to - from) / 150);
      tip.textContent = `${moment(time)}: ${used} of ${capacityAt(time)} GPUs${names ? ` (${names})` : ""}` +
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
