// Markdown to safe HTML. Sanitising comes last, over the whole text each time, so that nothing a model writes is ever markup
// that we did not allow; links ask before they are followed, and images are shown as links: loading one would tell its host.
import { Marked } from "/static/vendor/marked.js";
import DOMPurify from "/static/vendor/purify.js";
import highlight from "/static/vendor/highlight.js";

const escaped = (text) => text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);

const marked = new Marked({ gfm: true, breaks: true });
marked.use({
  renderer: {
    html: ({ text }) => escaped(text),
    image: ({ href, text }) => `<a href="${escaped(href)}">[image] ${escaped(text || href)}</a>`,
    code: ({ text, lang }) => {
      const name = (lang || "").split(/\s/)[0];
      const inner = highlight.getLanguage(name) ? highlight.highlight(text, { language: name }).value : escaped(text);
      return `<pre><code>${inner}</code></pre>`;
    },
  },
});

const ALLOWED = {
  ALLOWED_TAGS: ["a", "b", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i", "li", "ol", "p",
    "pre", "s", "span", "strong", "sub", "sup", "table", "tbody", "td", "th", "thead", "tr", "ul"],
  ALLOWED_ATTR: ["href", "class", "align", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_TRUSTED_TYPE: true,
};

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.nodeName === "A") {
    node.setAttribute("rel", "noopener noreferrer nofollow");
    node.setAttribute("target", "_blank");
  }
  const kept = [...node.classList ?? []].filter((name) => name.startsWith("hljs-"));
  if (node.hasAttribute?.("class")) node.setAttribute("class", kept.join(" "));
});

// Puts the text into an element.
export function show(element, text) {
  let html;
  try {
    html = marked.parse(text);
  } catch {
    html = escaped(text);
  }
  element.innerHTML = DOMPurify.sanitize(html, ALLOWED);
}
