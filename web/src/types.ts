// What the API answers (docs/reference/api.md); only what the dashboard reads.

export interface Estimate {
  finish_s: number | null;
  earliest_s: number | null;
  latest_s: number | null;
  source: string;
}

export interface Promised {
  admitted: boolean;
  pending: boolean;
  guaranteed_s: number | null;
  estimate: Estimate;
  earliest_deadline_s: number | null;
  reason: string;
}

export interface Job {
  job_id: string;
  owner: string;
  request: {
    name: string;
    script: string;
    args: string[];
    workdir: string;
    deadline_s: number | null;
    min_workers: number;
    max_workers: number | null;
    priority: string;
  };
  submitted_s: number;
  phase: "queued" | "running" | "paused" | "finished" | "failed" | "cancelled" | "refused";
  promise: Promised;
  wanted: number[];
  started_s: number | null;
  ended_s: number | null;
  done: number;
  of: number | null;
  batch_size: number | null;
  resizes: number;
  pause_s: number;
  restarts: number;
  exit_code: number | null;
  reason: string;
  most_workers: number | null;
  confined: string; // why it can use no more than most_workers
}

export interface Node {
  name: string;
  gpus: number;
  gpu_type: string;
  up: boolean;
  draining: boolean;
  used: number;
  held: number;
}

export interface Team {
  name: string; // empty for all users who are in no team
  slots: number;
  users: string[]; // of other teams than one's own only for administrators
  own: number;
  used: number;
  borrowed: number;
  running: number;
  waiting: number;
}

export interface LogEvent {
  seq: number;
  time_s: number;
  kind: string;
  job_id: string | null;
  node: string | null;
  data: Record<string, any>;
}

export interface Series {
  time_s: number[];
  curves: Record<string, (number | null)[]>;
  metrics: Record<string, (number | null)[]>;
  changes: ({ time_s: number; kind: string } & Record<string, any>)[];
}

export interface Explanation {
  why: string;
  nodes: string[];
  policy: string;
  team: { name: string; own: number; used: number; borrowed: number } | null;
  estimate: Estimate | null;
  curve: number[] | null;
  steps?: { nodes: number; workers: number; local_batch: number; step_s: number; rate: number; reports: number }[];
  measured?: { workers: number; rate: number }[];
}

export interface Lane {
  name: string;
  changes: [number, number][];
  ended_s: number | null;
}

export interface LanesAnswer {
  last_seq: number;
  jobs: Record<string, Lane>;
  capacity: [number, number][];
  marks: [number, string, string][];
}

export const over = (job: Job): boolean => ["finished", "failed", "cancelled", "refused"].includes(job.phase);
