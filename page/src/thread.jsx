// The conversation: its messages, of which only those near the window are drawn, and a follower of what is written.
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { IconButton } from "./controls.jsx";
import { t } from "./i18n.js";
import { Message } from "./message.jsx";
import * as state from "./state.js";

const CHUNK = 16, USUAL = 140; // messages that are drawn at once; the height of one that was never drawn

// Draws its messages while it is near the window, and is as high as they were when it is not.
function Chunk({ list, from, cut, live }) {
  const at = useRef(null), height = useRef(list.length * USUAL), [near, setNear] = useState(live);
  useEffect(() => {
    const watch = new IntersectionObserver(([entry]) => {
      if (!entry.isIntersecting && at.current) height.current = at.current.offsetHeight || height.current;
      setNear(entry.isIntersecting);
    }, { root: document.getElementById("scroll"), rootMargin: "1200px 0px" });
    watch.observe(at.current);
    return () => watch.disconnect();
  }, []);
  const shown = near || live;
  return <div class="chunk" ref={at} style={shown ? undefined : { height: `${height.current}px` }}>{shown && list.map((m, i) => <Message key={m.id} message={m} index={from + i} cut={m.id === cut?.before ? cut : null} />)}</div>;
}

export function Thread() {
  const path = state.path.value, id = state.conversation.value.id, scroll = useRef(null), inside = useRef(null), follow = useRef(true);
  const [away, setAway] = useState(false);
  const toEnd = () => {
    const at = scroll.current;
    if (at) at.scrollTop = at.scrollHeight;
  };
  useLayoutEffect(() => {
    follow.current = true;
    toEnd();
  }, [id, path.length]);
  useEffect(() => {
    const watch = new ResizeObserver(() => follow.current && toEnd());
    watch.observe(inside.current);
    watch.observe(scroll.current);
    return () => watch.disconnect();
  }, []);
  const last = useRef(0);
  const moved = () => {
    const { scrollTop, scrollHeight, clientHeight } = scroll.current, left = scrollHeight - scrollTop - clientHeight;
    // Only a person scrolls up: what is written makes the page longer.
    if (left < 48) follow.current = true;
    else if (scrollTop < last.current - 2) follow.current = false;
    last.current = scrollTop;
    setAway(left > 240 && !follow.current);
  };
  const chunks = [];
  for (let i = 0; i < path.length; i += CHUNK) chunks.push(path.slice(i, i + CHUNK));
  return (
    <div class="scroll" id="scroll" ref={scroll} onScroll={moved} tabIndex={0} role="region" aria-label={state.conversation.value.title || t("untitled")}>
      <section class="thread" ref={inside}>
        {chunks.map((list, i) => <Chunk key={`${id}-${i}`} list={list} from={i * CHUNK} cut={state.conversation.value.cut} live={i >= chunks.length - 1} />)}
      </section>
      {away && <IconButton class="to-end" icon="down" label={t("to-end")} onClick={() => { follow.current = true; toEnd(); setAway(false); }} />}
    </div>
  );
}

