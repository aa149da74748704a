// The API, read from its own document: routes, fields with their ranges, and answers.
import { $, element } from "./dom.js";

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

function route(path, method, operation, parts) {
  const body = operation.requestBody?.content["application/json"].schema;
  const forms = Object.entries(operation.responses).map(([status, answer]) => `${status}: ${Object.keys(answer.content ?? {}).join(", ") || answer.description}`);
  return element("details", {},
    element("summary", {}, element("code", { textContent: `${method.toUpperCase()} ${path}` }), ` ${operation.description ?? operation.summary}`),
    ...(operation.parameters ?? []).map((p) => element("p", {}, element("code", { textContent: p.name }), ` in the ${p.in}`)),
    body ? fields(body, parts) : null, element("p", { textContent: `Responses: ${forms.join("; ")}.` }));
}

const answer = await fetch("/openapi.json", { headers: key ? { Authorization: `Bearer ${key}` } : {} });
if (answer.ok) {
  const { paths, components } = await answer.json();
  const all = Object.entries(paths).flatMap(([path, item]) => Object.entries(item).map(([method, operation]) => route(path, method, operation, components.schemas)));
  $("routes").replaceChildren(...all);
} else {
  $("routes").replaceChildren(element("p", { className: "empty", textContent: answer.status === 401 ? "This server requires an API key: enter one in the page's settings." : `The server answered ${answer.status}.` }));
}
