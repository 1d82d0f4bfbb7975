// Colours that people with any kind of colour vision tell apart (after Okabe and Ito), light or dark behind them;
// then the same ones darker, for the ninth job and those after it.
const HUES = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a63d2", "#a3a33a"];
const PALETTE = [...HUES, ...HUES.map((hue) => `#${[1, 3, 5].map((at) => Math.round(0.6 * parseInt(hue.slice(at, at + 2), 16)).toString(16).padStart(2, "0")).join("")}`)];
const NONE = "#8b98a3"; // of a job that has not held a GPU yet
let given = new Map<string, number>();

// Jobs at the same time get different colours, as far as there are enough; `spans`: id, begin and end of each. Of
// the colours that no job at that time has, a job gets the one that was given longest ago. Colours once given stay.
export function assign(spans: [string, number, number][]): void {
  given = apart(spans, given);
}

export function apart(spans: [string, number, number][], kept = new Map<string, number>()): Map<string, number> {
  const chosen = new Map<string, number>();
  const givenAt = PALETTE.map(() => -1);
  const taken: [number, number][][] = PALETTE.map(() => []);
  const ordered = [...spans].sort((a, b) => a[1] - b[1]);
  const take = (id: string, begin: number, end: number, colour: number, turn: number): void => {
    chosen.set(id, colour);
    taken[colour].push([begin, end]);
    givenAt[colour] = Math.max(givenAt[colour], turn);
  };
  // Those that keep theirs come first, also if a job that began earlier is only known now.
  ordered.forEach(([id, begin, end], turn) => kept.has(id) && take(id, begin, end, kept.get(id)!, turn));
  ordered.forEach(([id, begin, end], turn) => {
    if (kept.has(id)) return;
    const all = PALETTE.map((_, c) => c);
    const free = all.filter((c) => !taken[c].some(([from, to]) => from < end && begin < to));
    const bright = free.filter((c) => c < HUES.length);
    const best = (bright.length ? bright : free.length ? free : all).reduce((a, b) => (givenAt[b] < givenAt[a] ? b : a));
    take(id, begin, end, best, turn);
  });
  return chosen;
}

// Colours for jobs that are looked at side by side: their own, but never one twice.
export function sideBySide(ids: string[]): string[] {
  const used = new Set<string>();
  return ids.map((id) => {
    const own = colour(id);
    const shown = own !== NONE && !used.has(own) ? own : PALETTE.find((one) => !used.has(one) && !ids.some((other) => colour(other) === one)) ?? own;
    used.add(shown);
    return shown;
  });
}

export function colour(jobId: string): string {
  const index = given.get(jobId);
  return index === undefined ? NONE : PALETTE[index];
}

// Text on a job's colour: black or white, whichever is read better.
export function onColour(jobId: string): string {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(colour(jobId).slice(at, at + 2), 16));
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#10161b" : "#fff";
}

// A job's colour as a pixel of an image.
export function packed(jobId: string): number {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(colour(jobId).slice(at, at + 2), 16));
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
}

export const line = (index: number): string => PALETTE[index % PALETTE.length];

export function css(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
