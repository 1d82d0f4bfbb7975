// Colours that people with any kind of colour vision tell apart (after Okabe and Ito), light or dark behind them.
const PALETTE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a63d2", "#a3a33a"];
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
  const until = PALETTE.map(() => -Infinity);
  [...spans].sort((a, b) => a[1] - b[1]).forEach(([id, begin, end], turn) => {
    const all = PALETTE.map((_, c) => c);
    const free = all.filter((c) => until[c] <= begin);
    const best = kept.get(id) ?? (free.length ? free : all).reduce((a, b) => (givenAt[b] < givenAt[a] ? b : a));
    givenAt[best] = turn;
    until[best] = Math.max(until[best], end);
    chosen.set(id, best);
  });
  return chosen;
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
