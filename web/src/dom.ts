// Elements made from text. There is no innerHTML anywhere: names and outputs of jobs are never markup.

type Child = Node | string | number | null | undefined | false;
type Attributes = Record<string, string | number | boolean | null | undefined | ((event: any) => void)>;

function fill(element: Element, attributes: Attributes, children: Child[]): void {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
}

export function h<K extends keyof HTMLElementTagNameMap>(tag: K, attributes: Attributes = {}, ...children: Child[]): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  fill(element, attributes, children);
  return element;
}

export function setText(element: Element, text: string): void {
  if (element.textContent !== text) element.textContent = text;
}

// Asks before something that cannot be undone; resolves to whether it was confirmed.
export function confirmed(title: string, text: string, verb: string, dangerous = false): Promise<boolean> {
  return new Promise((done) => {
    const dialog = h("dialog", { "aria-labelledby": "ask" });
    const answer = (yes: boolean) => () => (dialog.close(), dialog.remove(), done(yes));
    dialog.append(
      h("h2", { id: "ask" }, title),
      h("p", {}, text),
      h("div", { class: "buttons" },
        h("button", { type: "button", click: answer(false) }, "Back"),
        h("button", { type: "button", class: dangerous ? "danger" : "primary", click: answer(true) }, verb)),
    );
    dialog.addEventListener("cancel", answer(false));
    document.body.append(dialog);
    dialog.showModal();
  });
}

let toastTimer = 0;
export function toast(text: string, bad = false): void {
  let box = document.getElementById("toast");
  if (!box) {
    box = h("div", { id: "toast", role: "status" });
    document.body.append(box);
  }
  box.className = bad ? "bad show" : "show";
  box.textContent = text;
  clearTimeout(toastTimer);
  toastTimer = window.setTimeout(() => box!.classList.remove("show"), 6000);
}
