// Colours that people with any kind of colour vision tell apart (after Okabe and Ito), light or dark behind them.
const PALETTE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a63d2", "#a3a33a"];
const given = new Map<string, number>();

// Neighbours in time get different colours: the next one for each job that is seen for the first time.
export function colour(jobId: string): string {
  let index = given.get(jobId);
  if (index === undefined) given.set(jobId, (index = given.size));
  return PALETTE[index % PALETTE.length];
}

// Colours for jobs in this order, whatever they were given before.
export function inOrder(jobIds: string[]): void {
  given.clear();
  for (const id of jobIds) colour(id);
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
