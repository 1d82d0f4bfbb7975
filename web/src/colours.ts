// Colours that people with any kind of colour vision tell apart (after Okabe and Ito), light or dark behind them.
const PALETTE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a63d2", "#a3a33a"];
const given = new Map<string, number>();

// Neighbours in time get different colours: the next one for each job that is seen for the first time.
export function colour(jobId: string): string {
  let index = given.get(jobId);
  if (index === undefined) given.set(jobId, (index = given.size));
  return PALETTE[index % PALETTE.length];
}

export const line = (index: number): string => PALETTE[index % PALETTE.length];

export function css(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
