// The dashboard: sign-in, navigation, and one view at a time, kept up to date by the event stream.
import "./style.css";
import * as api from "./api";
import { h, setText, toast } from "./dom";
import { state } from "./state";
import { clusterView } from "./views/cluster";
import { compareView } from "./views/compare";
import { jobView } from "./views/job";
import { queueView } from "./views/queue";
import { signIn } from "./views/signin";
import { submitView } from "./views/submit";
import type { View } from "./views/view";
import { whatIfView } from "./views/whatif";

const app = document.getElementById("app")!;
const PAGES: [string, string, () => View][] = [
  ["cluster", "Cluster", clusterView],
  ["queue", "Queue", queueView],
  ["submit", "Submit", submitView],
  ["whatif", "What if", whatIfView],
];
let view: View | null = null;
const main = h("main", { id: "main", tabindex: -1 });
const connection = h("span", { class: "connection", role: "status" });
const who = h("span", { class: "quiet who" });
const links = new Map<string, HTMLAnchorElement>();

function theme(): void {
  const now = document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  const next = now === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  localStorage.setItem("swell-theme", next);
  show();
}

function frame(): HTMLElement[] {
  const nav = h("nav", { "aria-label": "Pages" });
  for (const [id, title] of PAGES) {
    const link = h("a", { href: `#/${id}` }, title);
    links.set(id, link);
    nav.append(link);
  }
  return [
    h("header", {}, h("a", { class: "brand", href: "#/cluster" }, h("img", { src: "/dashboard/icon.svg", alt: "", width: 26, height: 26 }), "swell"), nav,
      h("div", { class: "right" }, connection, who,
        h("button", { type: "button", class: "plain", "aria-label": "Dark or light", title: "Dark or light", click: theme }, "◐"),
        h("button", { type: "button", class: "plain", click: () => api.signOut() }, "Sign out"))),
    main,
  ];
}

function nowhere(page: string): View {
  const element = h("section", { class: "card narrow" }, h("h2", {}, "There is no such page"),
    h("p", {}, `The dashboard has no page '${page}'. `, h("a", { href: "#/cluster" }, "The cluster"), " and ", h("a", { href: "#/queue" }, "the queue"), " are there."));
  return { title: "No such page", element, update() {} };
}

function show(): void {
  if (!state.loaded) return;
  view?.close?.();
  const [, asked, argument = ""] = location.hash.split("?")[0].split("/");
  const page = asked || "cluster";
  if (page === "job") view = jobView(decodeURIComponent(argument));
  else if (page === "compare") view = compareView(argument.split(",").map(decodeURIComponent));
  else view = PAGES.find(([id]) => id === page)?.[2]() ?? nowhere(page);
  for (const [id, link] of links) {
    if (id === page || (id === "queue" && ["job", "compare"].includes(page))) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${view.title} · swell`;
  main.replaceChildren(h("h1", { class: "hidden" }, view.title), view.element);
  view.update([]);
}

function update(): void {
  setText(connection, state.connected ? "live" : "reconnecting …");
  connection.classList.toggle("up", state.connected);
  setText(who, `${state.who.user} (${state.who.role})`);
}

async function begin(): Promise<void> {
  app.replaceChildren(...frame());
  main.replaceChildren(h("p", { class: "loading" }, "Reading …"));
  try {
    const reading = state.start();
    const shown = state.subscribe(() => {
      if (!state.loaded) return;
      shown();
      performance.mark("swell-first-view");
      show();
    });
    await reading;
  } catch (error) {
    if (!api.signedIn()) return;
    toast(error instanceof Error ? error.message : String(error), true);
    setTimeout(begin, 2000);
  }
}

const stored = localStorage.getItem("swell-theme");
if (stored === "dark" || stored === "light") document.documentElement.dataset.theme = stored;
state.subscribe((events) => {
  update();
  view?.update(events);
});
setInterval(() => {
  if (!document.hidden && state.loaded) view?.tick?.();
}, 1000);
window.addEventListener("hashchange", () => {
  show();
  main.focus({ preventScroll: true });
  window.scrollTo(0, 0);
});
window.addEventListener("resize", () => view?.tick?.());
api.whenSignedOut(() => {
  view?.close?.();
  view = null;
  state.stop();
  app.replaceChildren(signIn(begin));
});
if (api.signedIn()) void begin();
else app.replaceChildren(signIn(begin));
