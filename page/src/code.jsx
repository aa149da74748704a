// A block of code: its language, a button to copy, and colours once it is whole.
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { CopyButton } from "./controls.jsx";
import { whenIdle } from "./dom.js";
import { highlight } from "./highlight.js";

const NAMES = { js: "JavaScript", javascript: "JavaScript", ts: "TypeScript", typescript: "TypeScript", py: "Python", python: "Python", cpp: "C++", "c++": "C++", c: "C", cs: "C#", csharp: "C#",
  html: "HTML", xml: "XML", css: "CSS", json: "JSON", sql: "SQL", sh: "Shell", bash: "Bash", yaml: "YAML", yml: "YAML", md: "Markdown", rs: "Rust", rust: "Rust", go: "Go", php: "PHP", tex: "LaTeX", latex: "LaTeX" };
const nameOf = (language) => NAMES[language.toLowerCase()] ?? (language ? language[0].toUpperCase() + language.slice(1) : "");

const draw = (nodes) => nodes.map((n, i) => (typeof n === "string" ? n : <span key={i} class={n.scope}>{draw(n.children)}</span>));

// A block that grows is laid out a few lines at a time: what stands is not laid out again.
const STEP = 40;
function lines(text) {
  const all = text.split("\n"), found = [];
  for (let i = 0; i < all.length; i += STEP) found.push(<span key={i} class="lines">{all.slice(i, i + STEP).join("\n")}</span>);
  return found;
}

export function Code({ text, language, open }) {
  const grew = useRef(false), [parts, colour] = useState(null);
  grew.current ||= open;
  useLayoutEffect(() => {
    colour(null);
    if (open || text.length > 50000) return undefined;
    const now = () => colour(highlight(text, language));
    if (!grew.current) return now();
    // What a model just wrote is coloured when the page has nothing else to do: it goes on writing.
    return whenIdle(now);
  }, [text, language, open]);
  return (
    <div class="code">
      <div class="code-head"><span>{nameOf(language)}</span><CopyButton text={() => text} /></div>
      <pre tabIndex={0}><code>{parts ? draw(parts) : text.length > 4000 ? lines(text) : text}</code></pre>
    </div>
  );
}
