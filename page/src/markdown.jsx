// Markdown to elements, never by way of HTML: what a model writes is text wherever it is no construct that is known here.
// While a text grows, only its last blocks are read again: what stands before them cannot change any more.
import { Lexer, Marked } from "marked";
import { memo } from "preact/compat";
import { useLayoutEffect, useRef } from "preact/hooks";
import { Code } from "./code.jsx";
import { MathText } from "./math.jsx";

const math = (token) => ({ ...token, type: "math" });
const EXTENSIONS = [
  {
    name: "mathBlock", level: "block",
    start: (src) => src.match(/(?:^|\n)\s{0,3}(?:\$\$|\\\[)/)?.index,
    tokenizer(src) {
      const found = /^ {0,3}\$\$([^]+?)\$\$ *(?:\n|$)/.exec(src) ?? /^ {0,3}\\\[([^]+?)\\\] *(?:\n|$)/.exec(src);
      return found ? { type: "mathBlock", raw: found[0], text: found[1].trim(), display: true } : undefined;
    },
  },
  {
    name: "mathInline", level: "inline",
    start: (src) => src.match(/\$|\\\(|\\\[/)?.index,
    tokenizer(src) {
      const display = /^\$\$([^$]+?)\$\$/.exec(src) ?? /^\\\[([^]+?)\\\]/.exec(src);
      if (display) return { type: "mathInline", raw: display[0], text: display[1].trim(), display: true };
      const found = /^\$(?![\s\d][^$\n]*\s\$)((?:\\[^\n]|[^\\$\n])+?)(?<!\s)\$(?![\d\w])/.exec(src) ?? /^\\\(([^]+?)\\\)/.exec(src);
      return found ? { type: "mathInline", raw: found[0], text: found[1].trim() } : undefined;
    },
  },
];
const marked = new Marked({ gfm: true, breaks: true }, { extensions: EXTENSIONS });

const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: "\"", apos: "'", nbsp: "\u00a0", hellip: "…", mdash: "—", ndash: "–", times: "×", rarr: "→", larr: "←", deg: "°", copy: "©", middot: "·" };
function decoded(text) {
  return text.replace(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|([a-z]+));/gi, (whole, number, hex, name) => {
    if (name) return ENTITIES[name] ?? whole;
    const code = number ? Number(number) : parseInt(hex, 16);
    return code > 0 && code < 0x110000 && (code < 0xd800 || code > 0xdfff) ? String.fromCodePoint(code) : whole;
  });
}

const safe = (href) => /^(?:https?:\/\/|mailto:)/i.test(href ?? "");
const Link = ({ href, children }) => (safe(href) ? <a href={href} target="_blank" rel="noopener noreferrer nofollow">{children}</a> : <>{children}</>);

function inline(tokens = []) {
  return tokens.map((t, i) => {
    switch (t.type) {
      case "text": return t.tokens ? <span key={i}>{inline(t.tokens)}</span> : decoded(t.text);
      case "escape": return t.text;
      case "strong": return <strong key={i}>{inline(t.tokens)}</strong>;
      case "em": return <em key={i}>{inline(t.tokens)}</em>;
      case "del": return <del key={i}>{inline(t.tokens)}</del>;
      case "codespan": return <code key={i}>{t.text}</code>;
      case "br": return <br key={i} />;
      case "link": return <Link key={i} href={t.href}>{inline(t.tokens)}</Link>;
      // An image is shown as a link: loading it would tell its host.
      case "image": return <Link key={i} href={t.href}>[{t.text || t.href}]</Link>;
      case "html": return /^<br\s*\/?>$/i.test(t.raw) ? <br key={i} /> : t.raw;
      case "mathInline": return <MathText key={i} {...math(t)} />;
      default: return t.raw;
    }
  });
}

const Block = memo(({ token, open }) => {
  const t = token;
  switch (t.type) {
    case "heading": {
      const Tag = `h${Math.min(6, t.depth + 1)}`; // the page has its own first
      return <Tag data-depth={t.depth}>{inline(t.tokens)}</Tag>;
    }
    case "paragraph": return <p>{inline(t.tokens)}</p>;
    case "text": return <>{t.tokens ? inline(t.tokens) : decoded(t.text)}</>;
    case "code": return <Code text={t.text} language={(t.lang ?? "").split(/\s/)[0]} open={open} />;
    case "blockquote": return <blockquote><Blocks tokens={t.tokens} /></blockquote>;
    case "hr": return <hr />;
    case "mathBlock": return <MathText {...math(t)} />;
    case "html": return <p>{t.raw}</p>;
    case "list": {
      const Tag = t.ordered ? "ol" : "ul";
      return (
        <Tag start={t.ordered && t.start !== 1 ? t.start : undefined} class={t.items.some((item) => item.task) ? "tasks" : undefined}>
          {t.items.map((item, i) => (
            <li key={i}>
              {item.task && <input type="checkbox" checked={item.checked} disabled aria-label={item.checked ? "done" : "to do"} />}
              <Blocks tokens={item.tokens.filter((inner) => inner.type !== "checkbox")} />
            </li>
          ))}
        </Tag>
      );
    }
    case "table": return (
      <div class="table" tabIndex={0} role="region" aria-label="table"><table>
        <thead><tr>{t.header.map((cell, i) => <th key={i} class={cell.align}>{inline(cell.tokens)}</th>)}</tr></thead>
        <tbody>{t.rows.map((row, r) => <tr key={r}>{row.map((cell, i) => <td key={i} class={cell.align}>{inline(cell.tokens)}</td>)}</tr>)}</tbody>
      </table></div>
    );
    default: return t.type === "space" || t.type === "def" ? null : <p>{t.raw}</p>;
  }
}, (a, b) => a.token.raw === b.token.raw && a.token.type === b.token.type && a.open === b.open);

const Blocks = ({ tokens }) => tokens.map((token, i) => <Block key={i} token={token} open={false} />);

// The blocks of a text that begins with the one before: those in `kept`, but its last two, still stand.
export function grow(kept, text) {
  let tokens = [], done = "";
  if (kept && text.startsWith(kept.done)) ({ tokens, done } = kept);
  const lexer = new Lexer(marked.defaults), tail = text.slice(done.length);
  Object.assign(lexer.tokens.links, kept?.links);
  const found = [...lexer.lex(tail)], links = { ...kept?.links, ...lexer.tokens.links };
  const all = [...tokens, ...found];
  const solid = found.map((t) => t.type !== "space").lastIndexOf(true) - 1;
  const settled = found.slice(0, Math.max(0, solid)), raw = settled.map((t) => t.raw).join("");
  // What the reader changed (as it may a tab) cannot be cut off by its length.
  return tail.startsWith(raw) ? { tokens: [...tokens, ...settled], done: done + raw, all, links } : { tokens, done, all, links };
}

// Blocks are drawn in sections: one that stands costs a frame nothing, however long the text becomes. None begins with a block
// that has a margin above, which would not collapse with the one before.
const SECTION = 12;
function sections(tokens) {
  const found = [];
  for (const token of tokens) {
    if (token.type === "space" || token.type === "def") continue;
    if (!found.length || (found.at(-1).length >= SECTION && token.type !== "heading" && token.type !== "hr")) found.push([]);
    found.at(-1).push(token);
  }
  return found;
}
const Section = memo(
  ({ tokens, open }) => <div class="section">{tokens.map((token, i) => <Block key={i} token={token} open={open && i === tokens.length - 1} />)}</div>,
  (a, b) => a.open === b.open && a.tokens.length === b.tokens.length && a.tokens.every((token, i) => token === b.tokens[i]),
);

// The blocks of a text, and in `kept` what its next state needs. What was written here stands when it is whole, unless a link's
// address came after its name.
function read(kept, text, growing) {
  if (kept?.text === text && (growing || kept.whole)) return kept;
  try {
    const state = grow(growing || (kept && !Object.keys(kept.links).length) ? kept : null, text);
    return { ...state, text, whole: !growing, turn: (kept?.turn ?? 0) + (!growing && Object.keys(state.links).length > 0) };
  } catch {
    return { tokens: [], done: "", links: {}, all: [{ type: "text", raw: text, text }], text, whole: !growing, turn: 0 };
  }
}

// growing: the text is still written. report(milliseconds): what drawing took.
export function Markdown({ text, growing = false, report }) {
  const kept = useRef(null), began = performance.now();
  kept.current = read(kept.current, text.replace(/\r\n?/g, "\n"), growing);
  const { all, turn } = kept.current, parts = sections(all);
  useLayoutEffect(() => report?.(performance.now() - began));
  return <div class="prose">{parts.map((tokens, i) => <Section key={`${turn}-${i}`} tokens={tokens} open={growing && i === parts.length - 1} />)}</div>;
}
