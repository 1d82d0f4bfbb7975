import * as api from "../api";
import { h } from "../dom";
import { duration, number, percent } from "../format";
import type { MiniLane } from "../mini";
import { miniLanes, spanOf } from "../mini";
import { state } from "../state";
import type { View } from "./view";

interface Run {
  policy: string;
  cluster: string;
  jobs: number;
  finished: number;
  refused: number;
  avg_jct_s: number | null;
  p99_jct_s: number | null;
  makespan_s: number | null;
  deadline_jobs: number;
  deadline_met: number;
  utilisation: number | null;
  resizes: number;
  left_out: number;
  lanes?: MiniLane[];
}

const FIRST = ["tide", "elasticflow", "afs-l", "tiresias"];
const COLUMNS: [string, (run: Run) => number | null, (value: number) => string, "low" | "high" | ""][] = [
  ["average completion", (run) => run.avg_jct_s, duration, "low"],
  ["slowest 1 %", (run) => run.p99_jct_s, duration, "low"],
  ["all done after", (run) => run.makespan_s, duration, "low"],
  ["deadlines met", (run) => (run.deadline_jobs ? run.deadline_met / run.deadline_jobs : null), percent, "high"],
  ["GPUs busy", (run) => run.utilisation, percent, "high"],
  ["resizes", (run) => run.resizes, number, ""],
];

export function whatIfView(): View {
  const choices = h("fieldset", { class: "policies" }, h("legend", {}, "Policies"));
  const cluster = h("input", { id: "cluster", placeholder: "as it was", autocomplete: "off", "aria-describedby": "cluster-help" });
  const go = h("button", { class: "primary" }, "Replay");
  const result = h("div", { "aria-live": "polite" });
  const form = h("form", { submit: replay }, choices,
    h("div", { class: "field short-field" }, h("label", { for: "cluster" }, "Cluster"), cluster, h("small", { id: "cluster-help" }, "Nodes x GPUs, such as 8x8. Empty: the cluster as it was, with its failures.")),
    h("div", { class: "buttons" }, go));
  const element = h("div", {}, h("section", { class: "card" }, h("div", { class: "head" }, h("h2", {}, "What if?")),
    h("p", { class: "quiet" }, "Replays this cluster's own recorded history, with the speeds that its jobs really had, under other policies."), form), result);
  if (state.who.role !== "admin") {
    form.replaceWith(h("p", {}, "Replays read the jobs of all users, so they need an administrator's token."));
  } else void load();

  async function load(): Promise<void> {
    const { policies } = await api.get<{ policies: { name: string; goal: string; error: string | null }[] }>("/v1/policies");
    for (const policy of policies.filter((one) => !one.error)) {
      const box = h("input", { type: "checkbox", value: policy.name, checked: FIRST.includes(policy.name) });
      choices.append(h("label", { title: policy.goal }, box, h("span", {}, h("strong", {}, policy.name), h("small", {}, policy.goal))));
    }
  }

  async function replay(event: Event): Promise<void> {
    event.preventDefault();
    const policies = [...choices.querySelectorAll<HTMLInputElement>("input:checked")].map((one) => one.value);
    go.disabled = true;
    result.replaceChildren(h("section", { class: "card" }, h("p", {}, `Replaying under ${policies.length === 1 ? policies[0] : policies.length ? `${policies.length} policies` : "the present policy"} …`)));
    try {
      const answer = await api.post<{ runs: Run[] }>("/v1/replay", { policies, cluster: cluster.value.trim() || null });
      result.replaceChildren(table(answer.runs), pictures(answer.runs));
    } catch (error) {
      result.replaceChildren(h("section", { class: "card" }, h("p", { class: "bad" }, error instanceof Error ? error.message : String(error))));
    } finally {
      go.disabled = false;
    }
  }

  function table(runs: Run[]): HTMLElement {
    const head = h("tr", {}, h("th", { scope: "col" }, "policy"), ...COLUMNS.map(([name]) => h("th", { scope: "col" }, name)));
    const rows = runs.map((run) => h("tr", {}, h("th", { scope: "row" }, run.policy, h("small", {}, ` ${run.cluster}`)),
      ...COLUMNS.map(([, value, say, better]) => {
        const all = runs.map(value).filter((one): one is number => one !== null);
        const own = value(run);
        const cell = h("td", { class: "figure" });
        if (own === null) return h("td", {}, "–");
        const best = better && own === (better === "low" ? Math.min(...all) : Math.max(...all));
        const bar = h("span", { class: `meter${best ? " best" : ""}`, "aria-hidden": "true" });
        bar.style.width = `${(own / (Math.max(...all) || 1)) * 100}%`;
        cell.append(h("span", {}, say(own), best ? h("small", {}, " best") : ""), bar);
        return cell;
      })));
    const first = runs[0];
    return h("section", { class: "card" }, h("div", { class: "head" }, h("h2", {}, "Side by side"), h("span", { class: "quiet" }, `${first.jobs} jobs that have ended${first.left_out ? `; ${first.left_out} that go on are left out` : ""}`)),
      h("div", { class: "scroll" }, h("table", { class: "compare" }, h("thead", {}, head), h("tbody", {}, ...rows))));
  }

  // Who would have had how many GPUs, all on the same scale.
  function pictures(runs: Run[]): HTMLElement {
    const span = spanOf(runs.map((run) => run.lanes ?? []));
    const figures = runs.filter((run) => run.lanes?.length).map((run) => miniLanes(`${run.policy} ${run.cluster}`, run.lanes!, span));
    return h("section", { class: "card" }, h("div", { class: "head" }, h("h2", {}, "Who had how many GPUs"),
      h("span", { class: "quiet" }, "a lane for each job, the same colour and place everywhere; thicker with more GPUs")),
      h("div", { class: "minis" }, ...figures));
  }

  return { title: "What if", element, update() {} };
}
