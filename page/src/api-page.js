// The API, read from its own document: routes, fields with their ranges, and answers.
const $ = (id) => document.getElementById(id);

function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name in made && name !== "list" && name !== "form") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((c) => c !== null && c !== undefined));
  return made;
}

const { theme = "system" } = JSON.parse(localStorage.getItem("quarrelSettings") ?? "{}");
document.documentElement.dataset.theme = theme === "dark" || (theme === "system" && matchMedia("(prefers-color-scheme: dark)").matches) ? "dark" : "light";
const key = sessionStorage.getItem("quarrelKey") ?? "";

function typeOf(schema, parts) {
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.anyOf) return schema.anyOf.map((s) => typeOf(s, parts)).filter((t) => t !== "null").join(" or ");
  if (schema.enum ?? schema.const) return [schema.enum ?? schema.const].flat().map((v) => JSON.stringify(v)).join(", ");
  if (schema.type === "array") return `list of ${typeOf(schema.items ?? {}, parts)}`;
  return schema.type ?? "anything";
}

function rangeOf(schema) {
  const found = [schema, ...(schema.anyOf ?? [])];
  const says = (name, word) => found.filter((s) => s[name] !== undefined).map((s) => `${word} ${s[name]}`)[0];
  return [says("minimum", "at least"), says("exclusiveMinimum", "above"), says("maximum", "at most"), says("exclusiveMaximum", "below"),
    says("maxLength", "length at most"), says("maxItems", "entries at most")].filter(Boolean).join(", ");
}

function fields(schema, parts) {
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) => element("tr", {},
    element("td", {}, element("code", { textContent: name }), schema.required?.includes(name) ? " (required)" : ""),
    element("td", { textContent: typeOf(field, parts) }), element("td", { textContent: rangeOf(field) })));
  return element("table", {}, element("tr", {}, ...["field", "type", "range"].map((t) => element("th", { textContent: t }))), ...rows);
}

const EXAMPLES = { prompt: "Once upon a time", messages: [{ role: "user", content: "Hello" }], input: "a king", text: "Once upon a time", tokens: [1],
  query: "a king", documents: ["the king", "rain"], max_tokens: 16, max_output_tokens: 16 };

function exampleOf(schema) {
  const wanted = Object.keys(schema.properties ?? {}).filter((n) => n in EXAMPLES && (schema.required?.includes(n) || n.startsWith("max_") || n === "prompt"));
  return Object.fromEntries([...(schema.required?.includes("model") ? [["model", model]] : []), ...wanted.map((n) => [n, EXAMPLES[n]])]);
}

// Sends a request as it stands in the form, and shows what comes, streams as they come.
async function send(path, method, form, output) {
  const given = new FormData(form), query = new URLSearchParams();
  let url = path;
  for (const [name, value] of given) {
    if (name.startsWith("path:")) url = url.replace(`{${name.slice(5)}}`, value.split("/").map(encodeURIComponent).join("/"));
    if (name.startsWith("query:") && value) query.set(name.slice(6), value);
  }
  const headers = { ...(key ? { Authorization: `Bearer ${key}` } : {}), ...(given.has("body") ? { "Content-Type": "application/json" } : {}) };
  output.hidden = false;
  output.textContent = "…";
  try {
    const answer = await fetch(query.size ? `${url}?${query}` : url, { method: method.toUpperCase(), headers, body: given.get("body") ?? undefined });
    output.textContent = `${answer.status} ${answer.headers.get("content-type") ?? ""}\n\n`;
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let part = await reader.read(); !part.done; part = await reader.read()) output.textContent += part.value;
  } catch (error) {
    output.textContent += `\n${error.message}`;
  }
}

function trial(path, method, operation, body) {
  const output = element("pre", { hidden: true, tabIndex: 0, role: "region", ariaLabel: "The answer" });
  const inputs = (operation.parameters ?? []).map((p) => element("label", {}, `${p.name} `,
    element("input", { name: `${p.in}:${p.name}`, value: p.in === "path" ? model : "", required: p.required ?? false })));
  const text = body ? element("label", {}, "The body ", element("textarea", { name: "body", rows: 5, spellcheck: false, value: JSON.stringify(exampleOf(body), null, 1) })) : null;
  const form = element("form", { onsubmit: (event) => { event.preventDefault(); send(path, method, form, output); } },
    ...inputs, text, element("button", { type: "submit", textContent: "Send" }));
  return element("div", { className: "trial" }, form, output);
}

function route(path, method, operation, parts) {
  const body = operation.requestBody?.content["application/json"].schema;
  const forms = Object.entries(operation.responses).map(([status, answer]) => `${status}: ${Object.keys(answer.content ?? {}).join(", ") || answer.description}`);
  return element("details", {},
    element("summary", {}, element("code", { textContent: `${method.toUpperCase()} ${path}` }), ` ${operation.description ?? operation.summary}`),
    ...(operation.parameters ?? []).map((p) => element("p", {}, element("code", { textContent: p.name }), ` in the ${p.in}`)),
    body ? fields(body, parts) : null, element("p", { textContent: `Responses: ${forms.join("; ")}.` }),
    trial(path, method, operation, body));
}

const known = { headers: key ? { Authorization: `Bearer ${key}` } : {} };
const models = await fetch("/v1/models", known);
const model = models.ok ? (await models.json()).data[0]?.id ?? "" : "";
const answer = await fetch("/openapi.json", known);
if (answer.ok) {
  const { paths, components } = await answer.json();
  const all = Object.entries(paths).flatMap(([path, item]) => Object.entries(item).map(([method, operation]) => route(path, method, operation, components.schemas)));
  $("routes").replaceChildren(...all);
} else {
  $("routes").replaceChildren(element("p", { className: "empty", textContent: answer.status === 401 ? "This server requires an API key: enter one in the page's settings." : `The server answered ${answer.status}.` }));
}
