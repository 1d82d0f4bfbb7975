import * as api from "../api";
import { h } from "../dom";

export function signIn(onDone: () => void): HTMLElement {
  const input = h("input", { id: "token", type: "password", autocomplete: "off", spellcheck: "false", required: true, placeholder: "swell_…", "aria-describedby": "token-help token-error" });
  const error = h("p", { id: "token-error", class: "bad", role: "alert" });
  const form = h("form", { class: "card signin", submit: async (event: Event) => {
    event.preventDefault();
    error.textContent = "";
    const given = input.value.trim();
    try {
      const answer = await fetch("/v1/me", { headers: { Authorization: `Bearer ${given}` }, credentials: "omit" });
      if (!answer.ok) throw new Error((await answer.json()).error?.message ?? `the server answered ${answer.status}`);
      api.keepToken(given);
      onDone();
    } catch (problem) {
      error.textContent = problem instanceof TypeError ? "The server cannot be reached." : (problem as Error).message;
      input.select();
    }
  } },
    h("h1", {}, h("img", { src: "/dashboard/icon.svg", alt: "", width: 40, height: 40 }), "swell"),
    h("label", { for: "token" }, "Token"), input,
    h("small", { id: "token-help" }, "On the server's machine: cat ~/.swell/tokens/user (or admin, to see all jobs). It stays in this tab and never becomes part of an address."),
    error, h("button", { class: "primary" }, "Sign in"));
  queueMicrotask(() => input.focus());
  return form;
}
