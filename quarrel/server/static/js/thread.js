// The conversation on the screen: messages, their buttons, and the answer that is being written.
import { $, element } from "./dom.js";
import { show } from "./markdown.js";

const NAMES = { user: "You", assistant: "Model", error: "Something went wrong" };

// Callbacks: edit(index), again(index).
export class Thread {
  constructor(callbacks) {
    this.callbacks = callbacks;
    this.live = null;
    this.follow = true;
    $("scroll").addEventListener("scroll", () => {
      const s = $("scroll");
      this.follow = s.scrollHeight - s.scrollTop - s.clientHeight < 80;
    });
  }

  draw(conversation) {
    this.live = null;
    const nodes = conversation.messages.map((m, i) => this.#message(m, i));
    if (!nodes.length) {
      nodes.push(element("p", { className: "empty" }, element("strong", { textContent: "What would you like to write?" }),
        "Conversations are stored in this browser and sent only to this server."));
    }
    $("thread").replaceChildren(...nodes);
    this.follow = true;
    this.#scroll();
  }

  begin() {
    $("thread").querySelector(".empty")?.remove();
    const body = element("div", { className: "body typing" });
    const node = element("article", { className: "message assistant" }, element("p", { className: "who", textContent: NAMES.assistant }), body);
    $("thread").append(node);
    this.live = { body, text: "", queued: false };
    this.#scroll();
  }

  add(text) {
    if (!this.live) return;
    const live = this.live;
    live.text += text;
    if (live.queued) return;
    live.queued = true; // once a frame, however fast tokens come
    requestAnimationFrame(() => {
      live.queued = false;
      show(live.body, live.text);
      this.#scroll();
    });
  }

  #message(message, index) {
    const body = element("div", { className: "body" });
    if (message.role === "assistant") {
      show(body, message.text);
      for (const block of body.querySelectorAll("pre")) block.append(this.#copy(block, "copy-code"));
    } else {
      body.textContent = message.text;
    }
    const under = element("div", { className: "under" });
    const button = (label, act) => under.append(element("button", { type: "button", textContent: label, onclick: act }));
    button("Copy", (event) => copy(message.text, event.target));
    if (message.role === "user") button("Edit", () => this.callbacks.edit(index));
    else button("Regenerate", () => this.callbacks.again(index));
    if (message.stats) under.append(element("span", { textContent: message.stats }));
    return element("article", { className: `message ${message.role}` }, element("p", { className: "who", textContent: NAMES[message.role] }), body, under);
  }

  #copy(block, className) {
    const text = block.textContent;
    return element("button", { type: "button", className, textContent: "Copy", onclick: (event) => copy(text, event.target) });
  }

  #scroll() {
    if (this.follow) $("scroll").scrollTop = $("scroll").scrollHeight;
  }
}

async function copy(text, button) {
  const before = button.textContent;
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else if (!copyTheOldWay(text)) throw new Error("refused");
    button.textContent = "Copied";
  } catch {
    button.textContent = "Copy failed";
  }
  setTimeout(() => (button.textContent = before), 1200);
}

// For pages that came neither by https nor from this machine.
function copyTheOldWay(text) {
  const area = element("textarea", { value: text, className: "hidden" });
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}
