// Formulas. KaTeX comes when the first one does; it builds elements, so that nothing is parsed as HTML.
import { useEffect, useRef } from "preact/hooks";

let loading = null;

export function MathText({ text, display = false }) {
  const at = useRef(null);
  useEffect(() => {
    let gone = false;
    loading ??= import("katex");
    loading.then(({ default: katex }) => {
      if (!gone) katex.render(text, at.current, { displayMode: display, throwOnError: false, trust: false, maxExpand: 200, maxSize: 20 });
    }).catch(() => {});
    return () => { gone = true; };
  }, [text, display]);
  // KaTeX owns what is inside; keyed, so that a changed formula begins with its source again.
  return <span key={text} ref={at} class={display ? "math display" : "math"} tabIndex={display ? 0 : undefined}>{text}</span>;
}
