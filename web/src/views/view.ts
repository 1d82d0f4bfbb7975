import type { LogEvent } from "../types";

// A page of the dashboard: an element, what to do when something happened, and what to do when it is left.
export interface View {
  title: string;
  element: HTMLElement;
  update(events: LogEvent[]): void;
  tick?(): void; // once a second, for what moves with the clock
  close?(): void;
}
