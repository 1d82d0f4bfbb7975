// What the page knows: jobs, nodes and lanes. Read once, then kept up to date by the event stream. A job whose
// event changes more than its progress is read again, all such jobs of one second together.
import * as api from "./api";
import { assign } from "./colours";
import type { Job, Lane, LanesAnswer, LogEvent, Node, Team } from "./types";
import { over } from "./types";

const HISTORY_S = 24 * 3600;
const ENDED_KEPT = 300;
const ENDED_MOST = 3000;
const FEW = 8;
const DRAW_MS = 200;
const REFRESH_MS = 1000;
const SLOW_MS = 15_000;
const PAST_EVENTS = 500; // read before those to come: speeds are known at once, and what happened is shown
const MANY_MS = 3000; // between two readings of all active jobs

export interface Who {
  user: string;
  role: string;
}

class State {
  who: Who = { user: "", role: "user" };
  jobs = new Map<string, Job>();
  nodes: Node[] = [];
  policy = "";
  teams: Team[] = [];
  lanes = new Map<string, Lane>();
  capacity: [number, number][] = [];
  marks: [number, string, string][] = [];
  connected = false;
  loaded = false;
  everythingRead = false;
  events = 0;
  recent: LogEvent[] = []; // the last events that are not progress, oldest first
  version = 0; // grows with every change, so that views can skip what they have drawn

  private readAt = 0; // the event up to which jobs and lanes were read; older ones change neither
  private points = new Map<string, [number, number][]>();
  private stale = new Set<string>();
  private nodesStale = false;
  private listeners = new Set<(events: LogEvent[]) => void>();
  private waiting: LogEvent[] = [];
  private drawTimer = 0;
  private stopper: AbortController | null = null;

  get slots(): number {
    return this.nodes.reduce((sum, node) => sum + (node.up ? node.gpus - node.held : 0), 0);
  }

  get used(): number {
    return this.nodes.reduce((sum, node) => sum + node.used, 0);
  }

  // What jobs hold: GPUs, or slots on a machine that has none.
  get unit(): string {
    return this.nodes.length && this.nodes.every((node) => node.gpu_type === "cpu") ? "slot" : "GPU";
  }

  get mayChange(): boolean {
    return this.who.role !== "viewer";
  }

  // Iterations per second at the tuned batch, from the last reports on the present slots; null if unknown.
  rate(job: Job): number | null {
    const points = this.points.get(job.job_id);
    if (!points || points.length < 2 || job.phase !== "running") return null;
    const [first, last] = [points[0], points[points.length - 1]];
    return last[0] > first[0] ? Math.max(0, (last[1] - first[1]) / (last[0] - first[0])) : null;
  }

  // When the job will be done by the server's estimate, or else at its present speed; null if nobody knows.
  predicted(job: Job, now_s: number): number | null {
    if (job.ended_s !== null) return job.ended_s;
    const estimate = job.promise.estimate.finish_s;
    if (estimate !== null && estimate > now_s) return estimate;
    const rate = this.rate(job);
    return rate && job.of !== null && job.of > job.done ? now_s + (job.of - job.done) / rate : null;
  }

  subscribe(listener: (events: LogEvent[]) => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  async start(): Promise<void> {
    this.stop();
    const stopper = (this.stopper = new AbortController());
    const signal = stopper.signal;
    const since = Math.floor(Date.now() / 1000 - HISTORY_S);
    const history = api.get<LanesAnswer>(`/v1/lanes?since_s=${since}`, signal);
    const [who, nodes, policy, teams] = await Promise.all([
      api.get<Who>("/v1/me", signal),
      api.get<{ nodes: Node[] }>("/v1/nodes", signal),
      api.get<{ policy: string }>("/v1/policy", signal),
      api.get<{ teams: Team[] }>("/v1/teams", signal),
      this.readActive(signal),
    ]);
    this.who = who;
    this.nodes = nodes.nodes;
    this.policy = policy.policy;
    this.teams = teams.teams;
    this.loaded = true;
    this.changed([]); // the first view does not wait for the past
    const lanes = await history;
    this.lanes = new Map(Object.entries(lanes.jobs));
    this.capacity = lanes.capacity;
    this.marks = lanes.marks;
    this.readAt = lanes.last_seq;
    this.recent = this.past();
    this.paint();
    this.changed([]);
    const first = Math.max(lanes.last_seq - PAST_EVENTS, 0);
    void api.follow(first, (events) => this.apply(events), (up) => this.setConnected(up), signal);
    void this.keepFresh(signal);
    const ended = await api.get<{ jobs: Job[] }>(`/v1/jobs?limit=${ENDED_KEPT}`, signal);
    for (const job of ended.jobs) if (!this.jobs.has(job.job_id)) this.jobs.set(job.job_id, job);
    this.everythingRead = true;
    this.changed([]);
  }

  stop(): void {
    this.stopper?.abort();
    this.stopper = null;
    this.jobs.clear();
    this.points.clear();
    this.stale.clear();
    this.recent = [];
    this.loaded = this.connected = this.everythingRead = false;
  }

  // -- reading again -------------------------------------------------------------------------------------

  private async readActive(signal: AbortSignal): Promise<Set<string>> {
    const found = new Set<string>();
    const read = async (phase: string) => {
      let after = "";
      for (;;) {
        const page: { jobs: Job[]; next: string | null } = await api.get(`/v1/jobs?phase=${phase}&limit=1000${after}`, signal);
        for (const job of page.jobs) {
          this.jobs.set(job.job_id, job);
          found.add(job.job_id);
        }
        if (page.next === null) return;
        after = `&after=${encodeURIComponent(page.next)}`;
      }
    };
    await Promise.all(["running", "queued", "paused"].map(read));
    // A job that was active and is in none of the answers has ended meanwhile.
    for (const job of this.jobs.values()) if (!over(job) && !found.has(job.job_id)) this.stale.add(job.job_id);
    return found;
  }

  private async readOne(jobId: string, signal: AbortSignal): Promise<void> {
    try {
      this.jobs.set(jobId, await api.get<Job>(`/v1/jobs/${encodeURIComponent(jobId)}`, signal));
    } catch (error) {
      if (error instanceof api.Refusal && error.status === 404) this.jobs.delete(jobId);
      else throw error;
    }
  }

  private async keepFresh(signal: AbortSignal): Promise<void> {
    let slowAt = Date.now() + SLOW_MS;
    let manyAt = 0;
    while (!signal.aborted) {
      await api.pause(REFRESH_MS, signal);
      if (signal.aborted || !this.connected) continue;
      try {
        const slow = Date.now() >= slowAt;
        if (this.nodesStale || slow || this.stale.size) {
          this.nodesStale = false;
          this.nodes = (await api.get<{ nodes: Node[] }>("/v1/nodes", signal)).nodes;
          // What teams have changes with jobs and nodes. Whether there are any yet is looked at seldom.
          if (this.teams.length || slow) this.teams = (await api.get<{ teams: Team[] }>("/v1/teams", signal)).teams;
          if (!slow && !this.stale.size) this.changed([]);
        }
        if (slow) {
          slowAt = Date.now() + SLOW_MS;
          this.forgetOld();
          this.policy = (await api.get<{ policy: string }>("/v1/policy", signal)).policy;
          this.changed([]);
        }
        if (!this.stale.size || (this.stale.size > FEW && Date.now() < manyAt)) continue;
        const ids = [...this.stale];
        this.stale.clear();
        if (ids.length > FEW) {
          manyAt = Date.now() + MANY_MS;
          const active = await this.readActive(signal);
          for (const id of ids) if (!active.has(id)) this.stale.add(id);
          ids.splice(0, ids.length, ...[...this.stale].slice(0, 4 * FEW));
          for (const id of ids) this.stale.delete(id);
        }
        await Promise.all(ids.map((id) => this.readOne(id, signal)));
        this.changed([]);
      } catch {
        // The server is away or was slow; the stream's state says so, and the next turn tries again.
      }
    }
  }

  // A page may be open for weeks: what is older than the history that it began with is dropped.
  private forgetOld(): void {
    const since = Date.now() / 1000 - HISTORY_S;
    for (const [id, lane] of this.lanes) if (lane.ended_s !== null && lane.ended_s < since) this.lanes.delete(id);
    for (const [id, job] of this.jobs) if (job.ended_s !== null && job.ended_s < since && this.jobs.size > ENDED_MOST) this.jobs.delete(id);
    this.marks = this.marks.filter(([time]) => time >= since);
    while (this.capacity.length > 1 && this.capacity[1][0] < since) this.capacity.shift();
  }

  // -- events --------------------------------------------------------------------------------------------

  private setConnected(up: boolean): void {
    if (up === this.connected) return;
    this.connected = up;
    if (up) this.nodesStale = true;
    this.changed([]);
  }

  private apply(events: LogEvent[]): void {
    for (const event of events) {
      this.events += 1;
      if (event.seq > this.readAt ? event.kind !== "progress" : ["submitted", "rejected", "admitted"].includes(event.kind)) this.recent.push(event);
      if (event.job_id !== null) this.applySpeed(event.job_id, event);
      if (event.seq <= this.readAt) continue;
      if (event.job_id !== null) this.applyToJob(event.job_id, event);
      else if (event.node !== null) {
        this.marks.push([event.time_s, event.kind, event.node]);
        this.nodesStale = true;
        const node = this.nodes.find((one) => one.name === event.node);
        if (node && event.kind !== "node_slow") node.up = event.kind === "node_joined";
        this.capacity.push([event.time_s, this.nodes.reduce((sum, one) => sum + (one.up ? one.gpus : 0), 0)]);
      }
    }
    if (this.recent.length > 2 * PAST_EVENTS) this.recent.splice(0, this.recent.length - PAST_EVENTS);
    this.changed(events.filter((event) => event.seq > this.readAt));
  }

  private applySpeed(jobId: string, event: LogEvent): void {
    if (event.kind !== "progress") {
      if (!["checkpoint_saved", "submitted", "admitted"].includes(event.kind)) this.points.delete(jobId);
      return;
    }
    const points = this.points.get(jobId) ?? [];
    points.push([event.time_s, event.data.done ?? 0]);
    if (points.length > 6) points.shift();
    this.points.set(jobId, points);
  }

  private applyToJob(jobId: string, event: LogEvent): void {
    const job = this.jobs.get(jobId);
    const data = event.data;
    if (event.kind === "progress") {
      if (job) {
        job.done = data.done ?? job.done;
        job.of = data.of ?? job.of;
        job.batch_size = data.batch_size ?? job.batch_size;
      }
      return;
    }
    this.stale.add(jobId);
    if (event.kind === "worker_lost") this.marks.push([event.time_s, event.kind, jobId]);
    if (event.kind === "submitted") this.lanes.delete(jobId);
    if (["allocated", "resized", "preempted"].includes(event.kind)) {
      const slots: number[] = data.gpus ?? [];
      this.laneOf(jobId, data.name).changes.push([event.time_s, slots.length]);
      if (job) {
        job.wanted = slots;
        if (slots.length) job.phase = "running";
      }
    }
    if (["finished", "failed", "cancelled", "rejected"].includes(event.kind)) {
      const lane = this.lanes.get(jobId);
      if (lane) {
        lane.changes.push([event.time_s, 0]);
        lane.ended_s = event.time_s;
      }
      if (job) {
        job.wanted = [];
        job.ended_s = event.time_s;
        job.phase = event.kind === "rejected" ? "refused" : (event.kind as Job["phase"]);
      }
    }
  }

  private laneOf(jobId: string, name?: string): Lane {
    let lane = this.lanes.get(jobId);
    if (!lane) {
      lane = { name: name ?? this.jobs.get(jobId)?.request.name ?? jobId, changes: [], ended_s: null };
      this.lanes.set(jobId, lane);
      queueMicrotask(() => this.paint());
    }
    return lane;
  }

  // What happened before the page was opened, as far as the lanes tell it.
  private past(): LogEvent[] {
    const found: LogEvent[] = this.marks.map(([time_s, kind, about]) => ({ seq: 0, time_s, kind, job_id: kind === "worker_lost" ? about : null, node: kind === "worker_lost" ? null : about, data: {} }));
    for (const [job_id, lane] of this.lanes) {
      lane.changes.forEach(([time_s, gpus], at) => {
        const before = at ? lane.changes[at - 1][1] : 0;
        const over = lane.ended_s !== null && time_s >= lane.ended_s;
        const kind = over ? "ended" : !before ? "allocated" : gpus ? "resized" : "preempted";
        found.push({ seq: 0, time_s, kind, job_id, node: null, data: { before: new Array(before), gpus: new Array(gpus) } });
      });
    }
    return found.sort((a, b) => a.time_s - b.time_s).slice(-PAST_EVENTS);
  }

  private paint(): void {
    assign([...this.lanes].filter(([, lane]) => lane.changes.length).map(([id, lane]) => [id, lane.changes[0][0], lane.ended_s ?? Infinity]));
  }

  // Tell the views, a few times a second at most.
  private changed(events: LogEvent[]): void {
    this.version += 1;
    this.waiting.push(...events);
    if (this.drawTimer) return;
    this.drawTimer = window.setTimeout(() => {
      this.drawTimer = 0;
      const seen = this.waiting;
      this.waiting = [];
      for (const listener of [...this.listeners]) listener(seen);
    }, DRAW_MS);
  }
}

export const state = new State();
