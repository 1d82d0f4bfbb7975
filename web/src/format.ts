// Numbers and times for people.

export function duration(seconds: number): string {
  const s = Math.abs(seconds);
  if (s < 1) return `${s.toFixed(1)} s`;
  if (s < 99.5) return `${Math.round(s)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min${s < 600 && s % 60 >= 1 ? ` ${Math.floor(s % 60)} s` : ""}`;
  if (s < 86400) {
    const minutes = Math.floor((s % 3600) / 60);
    return `${Math.floor(s / 3600)} h${minutes ? ` ${minutes} min` : ""}`;
  }
  const hours = Math.floor((s % 86400) / 3600);
  return `${Math.floor(s / 86400)} d${hours ? ` ${hours} h` : ""}`;
}

export function moment(time_s: number): string {
  const date = new Date(time_s * 1000);
  const today = date.toDateString() === new Date().toDateString();
  const near = Math.abs(Date.now() / 1000 - time_s) < 3600;
  const clock = date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: near ? "2-digit" : undefined, hourCycle: "h23" });
  return today ? clock : `${date.toLocaleDateString([], { day: "numeric", month: "short" })} ${clock}`;
}

// A tick of a time axis: as fine as the axis.
export function clock(time_s: number, step_s: number): string {
  const date = new Date(time_s * 1000);
  if (step_s >= 86400) return date.toLocaleDateString([], { day: "numeric", month: "short" });
  return date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: step_s < 60 ? "2-digit" : undefined, hourCycle: "h23" });
}

export function number(value: number): string {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(1);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

export const percent = (share: number): string => `${Math.round(100 * share)} %`;

export const plural = (count: number, word: string): string => `${count} ${word}${count === 1 ? "" : "s"}`;

// "1h30m", "45 min", "2 days" as seconds; null if it is none of that.
export function parseDuration(text: string): number | null {
  const units: Record<string, number> = { s: 1, m: 60, h: 3600, d: 86400 };
  const pattern = /(\d+(?:\.\d+)?)\s*(s|m|h|d)[a-z]*\s*/gi;
  const clean = text.trim();
  let total = 0;
  let used = 0;
  for (const found of clean.matchAll(pattern)) {
    if (found.index !== used) return null;
    total += Number(found[1]) * units[found[2].toLowerCase()];
    used += found[0].length;
  }
  return used === clean.length && total > 0 ? total : null;
}

// Words of a command line; quotes keep spaces together.
export function words(text: string): string[] {
  return [...text.matchAll(/"((?:[^"\\]|\\.)*)"|'([^']*)'|(\S+)/g)].map((m) => m[1]?.replace(/\\(.)/g, "$1") ?? m[2] ?? m[3]);
}
