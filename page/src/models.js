// The server's models and routes.
import * as state from "./state.js";

export async function api(path, options = {}) {
  const key = state.secret.value, headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const answer = await fetch(path, { ...options, headers });
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => ({}));
  if (answer.status === 401) {
    state.server.value = { ...state.server.value, refused: true };
    if (!state.dialog.value) state.dialog.value = { kind: "key" };
  }
  const said = body.error?.message ?? body.error;
  throw new Error(typeof said === "string" ? said : `the server answered ${answer.status}`);
}

let asking = null;
export function loadModels() {
  asking ??= (async () => {
    try {
      const found = await (await api("/api/models")).json();
      state.server.value = { ...state.server.value, models: found.models, default: found.default, refused: false };
      if (!state.server.value.version) learn();
    } catch {
      // the state of the connection says it
    } finally {
      asking = null;
    }
  })();
  return asking;
}

export async function loadTools() {
  try {
    state.tools.value = (await (await api("/api/tools")).json()).tools;
  } catch {
    // the state of the connection says it
  }
}

async function learn() {
  const [version, document] = await Promise.all(["/version", "/openapi.json"].map(async (p) => (await api(p)).json()));
  state.server.value = { ...state.server.value, version: version.version, routes: new Set(Object.keys(document.paths)) };
}

export async function modelRequest(name, method) {
  const models = state.server.value.models.map((m) => (m.name === name ? { ...m, state: method === "POST" ? "loading" : "unloading" } : m));
  state.server.value = { ...state.server.value, models };
  try {
    await api(`/api/models/${encodeURIComponent(name)}`, { method });
  } finally {
    await loadModels();
  }
}
