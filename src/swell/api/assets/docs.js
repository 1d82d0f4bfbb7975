// Renders /openapi.json and lets people try each request. Loads nothing from other servers.
"use strict";

const make = (tag, text, attributes = {}) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
};

const resolve = (spec, schema) =>
  schema && schema.$ref ? schema.$ref.split("/").slice(1).reduce((at, part) => at[part], spec) : schema || {};

const typeOf = (spec, schema) => {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map((one) => typeOf(spec, one)).join(" or ");
  if (schema.type === "array") return `list of ${typeOf(spec, schema.items || {})}`;
  return schema.type || "any";
};

const example = (spec, schema) => {
  const whole = resolve(spec, schema);
  const out = {};
  for (const [name, field] of Object.entries(whole.properties || {})) {
    if ((whole.required || []).includes(name)) out[name] = (field.examples || [""])[0];
  }
  return JSON.stringify(out, null, 2);
};

const row = (name, kind, text) => {
  const line = make("tr");
  line.append(make("td", name), make("td", kind), make("td", text || ""));
  return line;
};

async function send(method, path, inputs, body, output) {
  let target = path;
  const query = new URLSearchParams();
  const headers = {};
  const token = document.getElementById("token").value.trim();
  if (token) headers.Authorization = `Bearer ${token}`;
  for (const { parameter, input } of inputs) {
    if (!input.value) continue;
    if (parameter.in === "path") target = target.replace(`{${parameter.name}}`, encodeURIComponent(input.value));
    else if (parameter.in === "query") query.set(parameter.name, input.value);
    else headers[parameter.name] = input.value;
  }
  if (body) headers["Content-Type"] = "application/json";
  if ([...query].length) target += `?${query}`;
  output.textContent = `${method} ${target} ...\n`;
  try {
    const answer = await fetch(target, { method, headers, body: body ? body.value : undefined });
    output.textContent = `${answer.status} ${answer.statusText}\n`;
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let part = await reader.read(); !part.done; part = await reader.read()) output.textContent += part.value;
  } catch (error) {
    output.textContent += String(error);
  }
}

function operation(spec, path, method, detail) {
  const box = make("details");
  const head = make("summary");
  head.append(make("span", method.toUpperCase(), { class: "method" }), make("code", path));
  box.append(head, make("p", detail.description || detail.summary || ""));

  const table = make("table");
  const inputs = [];
  for (const parameter of detail.parameters || []) {
    const line = row(parameter.name, `${parameter.in}, ${typeOf(spec, parameter.schema || {})}`, parameter.description);
    const input = make("input", undefined, { "aria-label": parameter.name });
    const cell = make("td");
    cell.append(input);
    line.append(cell);
    table.append(line);
    inputs.push({ parameter, input });
  }
  let body = null;
  const schema = detail.requestBody && detail.requestBody.content["application/json"].schema;
  if (schema) {
    for (const [name, field] of Object.entries(resolve(spec, schema).properties || {})) {
      table.append(row(name, `body, ${typeOf(spec, field)}`, field.description));
    }
    body = make("textarea", example(spec, schema), { "aria-label": "body" });
  }
  box.append(table);
  if (body) box.append(body);

  const answers = Object.entries(detail.responses).map(([status, one]) => `${status}: ${one.description}`);
  const output = make("pre", answers.join("\n"));
  const button = make("button", "Send");
  button.addEventListener("click", () => send(method.toUpperCase(), path, inputs, body, output));
  box.append(button, output);
  return box;
}

async function main() {
  const spec = await (await fetch("/openapi.json")).json();
  document.getElementById("version").textContent = spec.info.version;
  document.getElementById("summary").textContent = spec.info.summary;
  const place = document.getElementById("operations");
  place.replaceChildren();
  const groups = new Map();
  for (const [path, methods] of Object.entries(spec.paths)) {
    for (const [method, detail] of Object.entries(methods)) {
      const tag = (detail.tags || ["other"])[0];
      if (!groups.has(tag)) groups.set(tag, [make("h2", tag)]);
      groups.get(tag).push(operation(spec, path, method, detail));
    }
  }
  for (const nodes of groups.values()) place.append(...nodes);
}

main();
