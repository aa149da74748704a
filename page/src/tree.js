// A conversation is a tree: each message names the one before it, and answers to the same message are branches.
// What is shown is the path from its first message to `leaf`.

export function pathTo(messages, leaf) {
  const path = [];
  for (let at = messages.get(leaf); at && path.length < messages.size; at = messages.get(at.parent)) path.push(at);
  return path.reverse();
}

// All messages that follow the same one, oldest first.
export function siblings(messages, message) {
  const found = [...messages.values()].filter((m) => (m.parent ?? null) === (message.parent ?? null));
  return found.sort((a, b) => a.created - b.created || (a.id < b.id ? -1 : 1));
}

// The end of the branch through this message: as it was shown last (`chosen`: which message followed one), else the newest.
export function endBelow(messages, id, chosen) {
  const children = new Map();
  for (const m of messages.values()) if (m.parent) children.set(m.parent, [...(children.get(m.parent) ?? []), m]);
  let at = id;
  for (let n = 0; n < messages.size && children.has(at); n++) {
    const next = children.get(at);
    at = (next.find((m) => m.id === chosen.get(at)) ?? next.reduce((a, b) => (b.created >= a.created ? b : a))).id;
  }
  return at;
}

// The groups of the list of conversations: days first, then months.
export function dayOf(changed, now = Date.now()) {
  const midnight = new Date(now).setHours(0, 0, 0, 0), day = 86400000;
  if (changed >= midnight) return "today";
  if (changed >= midnight - day) return "yesterday";
  if (changed >= midnight - 7 * day) return "week";
  if (changed >= midnight - 30 * day) return "month";
  const at = new Date(changed);
  return `${at.getFullYear()}-${String(at.getMonth() + 1).padStart(2, "0")}`;
}
