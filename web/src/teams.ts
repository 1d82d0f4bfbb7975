// Teams: whose quota is whose, and what is borrowed and lent of it. Nothing is shown while there are no teams.
import { h, setText } from "./dom";
import { plural } from "./format";
import { state } from "./state";
import type { Job, Team } from "./types";

export const NO_TEAM = "(no team)";

// The team of a job, as far as this user may see who is in which team; nothing while there are no teams.
export function teamOf(job: Job): string {
  return state.teams.find((team) => team.name && team.users.includes(job.owner))?.name ?? "";
}

// A job's class of priority, if it is not the usual one: the arrow says it without colour.
export function classPill(job: Job): HTMLElement | null {
  const { priority } = job.request;
  if (priority === "normal") return null;
  return h("span", { class: `pill class-${priority}` }, h("span", { "aria-hidden": "true" }, priority === "high" ? "▲ " : "▼ "), priority, h("span", { class: "hidden" }, " priority"));
}

// How many slots each team lends: borrowed slots come from the idle part of the quotas, from each in proportion.
export function lentBy(teams: Team[]): number[] {
  const idle = teams.map((team) => Math.max(team.own - team.used, 0));
  const all = idle.reduce((sum, one) => sum + one, 0);
  const borrowed = Math.min(teams.reduce((sum, team) => sum + team.borrowed, 0), all);
  const exact = idle.map((one) => (all ? (one * borrowed) / all : 0));
  const lent = exact.map(Math.floor);
  const behind = exact.map((_, i) => i).sort((a, b) => exact[b] - lent[b] - (exact[a] - lent[a]));
  for (const i of behind.slice(0, borrowed - lent.reduce((sum, one) => sum + one, 0))) lent[i] += 1;
  return lent;
}

const COLUMNS = ["Quota", "In use", "Borrowed", "Lent", "Running", "Waiting"];

function makeRow(name: string) {
  const parts = ["own", "lent", "free", "end", "borrowed"].map((look) => h("span", { class: look }));
  const cells = COLUMNS.map((label) => h("td", { class: "number", "data-label": label }));
  const shown = name ? h("a", { href: `#/queue?${new URLSearchParams({ find: name })}` }, name) : NO_TEAM;
  const line = h("tr", {}, h("th", { scope: "row" }, shown), h("td", { class: "shares", "aria-hidden": "true" }, h("div", {}, ...parts)), ...cells);
  return { line, parts, cells };
}

export function teamsCard() {
  const body = h("tbody", {});
  const key = (look: string, text: string) => h("li", {}, h("span", { class: `swatch ${look}` }), text);
  const element = h("section", { class: "card", hidden: true, "aria-labelledby": "teams-title" },
    h("div", { class: "head" }, h("h2", { id: "teams-title" }, "Teams"),
      h("ul", { class: "legend shares", "aria-hidden": "true" }, key("own", "used of the quota"), key("lent", "lent"), key("free", "idle"), key("end", "end of the quota"), key("borrowed", "borrowed"))),
    h("table", { class: "teams" },
      h("caption", { class: "hidden" }, "Slots of each team"),
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Team"), h("td", { "aria-hidden": "true" }), ...COLUMNS.map((one) => h("th", { scope: "col", class: "number" }, one)))),
      body));
  let names = "";
  let rows: ReturnType<typeof makeRow>[] = [];

  function draw(): void {
    // Users in no team are a line of their own only if there is something to say of them.
    const teams = state.teams.filter((team) => team.name || team.own || team.used || team.waiting);
    element.hidden = !teams.length;
    if (JSON.stringify(teams.map((team) => team.name)) !== names) {
      names = JSON.stringify(teams.map((team) => team.name));
      rows = teams.map((team) => makeRow(team.name));
      body.replaceChildren(...rows.map((row) => row.line));
    }
    const lent = lentBy(teams);
    const most = Math.max(1, ...teams.map((team) => Math.max(team.own, team.used)));
    teams.forEach((team, i) => {
      const { line, parts, cells } = rows[i];
      const within = Math.min(team.used, team.own);
      const widths = [within, lent[i], team.own - within - lent[i], 0, team.borrowed];
      parts.forEach((part, at) => (part.style.width = `${(100 * widths[at]) / most}%`));
      const quota = !team.name ? `${team.own} left` : team.own < team.slots ? `${team.slots} (${team.own} now)` : String(team.slots);
      [quota, team.used, team.borrowed, lent[i], team.running, team.waiting].forEach((value, at) => {
        setText(cells[at], String(value));
        cells[at].classList.toggle("quiet", value === 0);
      });
      line.title = `${team.name || NO_TEAM}: ${team.used} of ${plural(team.own, "slot")}` + (team.borrowed ? `, ${team.borrowed} borrowed` : "") + (lent[i] ? `, ${lent[i]} lent` : "");
    });
  }

  return { element, draw };
}
