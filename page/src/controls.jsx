// Buttons, icons, menus and dialogs that every part of the page uses.
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import {
  ArrowDown, ArrowUp, ChartLine, Check, ChevronDown, ChevronLeft, ChevronRight, Copy, Download, Eject, Ellipsis, FileText, Globe, Keyboard, Menu as MenuLines,
  PanelLeft, Paperclip, Pencil, Play, Plus, RefreshCw, Search, Settings2, Square, SquarePen, SunMoon, Trash2, TriangleAlert, Upload, Wrench, X, BookOpen, Lightbulb, Code as CodeSign, Languages, AlignLeft, KeyRound, Scissors, Camera,
} from "lucide";
import { copy } from "./dom.js";
import { t } from "./i18n.js";

const ICONS = { down: ArrowDown, up: ArrowUp, chart: ChartLine, check: Check, "chevron-down": ChevronDown, left: ChevronLeft, right: ChevronRight, copy: Copy, download: Download, eject: Eject,
  more: Ellipsis, file: FileText, globe: Globe, keyboard: Keyboard, lines: MenuLines, side: PanelLeft, attach: Paperclip, edit: Pencil, play: Play, plus: Plus, again: RefreshCw, search: Search,
  tune: Settings2, stop: Square, write: SquarePen, theme: SunMoon, trash: Trash2, warn: TriangleAlert, upload: Upload, tool: Wrench, close: X, book: BookOpen, idea: Lightbulb, code: CodeSign,
  languages: Languages, text: AlignLeft, key: KeyRound, cut: Scissors, camera: Camera, blank: [] };

export function Icon({ name, size = 18 }) {
  return (
    <svg class={`icon-${name}`} width={size} height={size} viewBox="0 0 24 24" fill="none" stroke="currentColor" stroke-width="1.75" stroke-linecap="round" stroke-linejoin="round" aria-hidden="true">
      {ICONS[name].map(([Tag, attributes], i) => <Tag key={i} {...attributes} />)}
    </svg>
  );
}

export const IconButton = ({ icon, label, size, class: name = "", ...rest }) => (
  <button type="button" class={`icon ${name}`} aria-label={label} data-tip={label} {...rest}><Icon name={icon} size={size} /></button>
);

export function CopyButton({ text, label = t("copy"), class: name = "" }) {
  const [state, say] = useState("");
  const act = async () => {
    try {
      await copy(text());
      say("copied");
    } catch {
      say("copy-failed");
    }
    setTimeout(() => say(""), 1400);
  };
  return <IconButton class={name} icon={state === "copied" ? "check" : "copy"} size={16} label={state ? t(state) : label} onClick={act} />;
}

// A button that opens what is given below or above itself; Escape and a click elsewhere close it.
export function Popover({ button, label, children, class: name = "", align = "start", role = "menu" }) {
  const [open, setOpen] = useState(false), [place, setPlace] = useState({}), at = useRef(null), inside = useRef(null);
  const close = (back) => {
    setOpen(false);
    if (back) at.current?.querySelector("button")?.focus();
  };
  useLayoutEffect(() => {
    if (!open) return;
    const box = at.current.getBoundingClientRect(), own = inside.current.getBoundingClientRect();
    const below = box.bottom + 6 + own.height < innerHeight || box.top < own.height + 12;
    const left = Math.max(8, Math.min(align === "end" ? box.right - own.width : box.left, innerWidth - own.width - 8));
    setPlace({ left: `${left}px`, top: `${Math.max(8, below ? box.bottom + 6 : box.top - own.height - 6)}px` });
    inside.current.querySelector("[role^=menuitem], input, button, textarea")?.focus();
  }, [open]);
  useEffect(() => {
    if (!open) return undefined;
    const away = (event) => !at.current?.contains(event.target) && close(false);
    document.addEventListener("pointerdown", away);
    return () => document.removeEventListener("pointerdown", away);
  }, [open]);
  const keys = (event) => {
    if (!open) return;
    if (event.key === "Escape") {
      event.stopPropagation();
      close(true);
    } else if (role === "menu" && ["ArrowDown", "ArrowUp"].includes(event.key)) {
      event.preventDefault();
      const items = [...inside.current.querySelectorAll("[role^=menuitem]")], now = items.indexOf(document.activeElement);
      items.at((now + (event.key === "ArrowDown" ? 1 : -1)) % items.length)?.focus();
    } else if (event.key === "Tab" && role === "menu") close(false);
  };
  return (
    <span class={`popover ${name}`} ref={at} onKeyDown={keys}>
      {button({ onClick: () => setOpen(!open), "aria-haspopup": role, "aria-expanded": open })}
      {open && <div class="pop" ref={inside} role={role} aria-label={label} style={place}>{children(() => close(true))}</div>}
    </span>
  );
}

// checked: whether it is the one of several that holds; others are no choice.
export const MenuItem = ({ icon, children, danger, onClick, close, checked }) => (
  <button type="button" role={checked === undefined ? "menuitem" : "menuitemradio"} aria-checked={checked} tabIndex={-1} class={danger ? "danger" : ""} onClick={() => { close(); onClick(); }}>{icon && <Icon name={icon} size={16} />}{children}</button>
);

export function Dialog({ title, onClose, children, class: name = "" }) {
  const at = useRef(null);
  useEffect(() => {
    at.current.showModal();
    (at.current.querySelector("form input") ?? at.current.firstChild).focus();
    return () => at.current?.close();
  }, []);
  return (
    <dialog ref={at} class={name} aria-label={title} onCancel={(event) => { event.preventDefault(); onClose(); }} onClick={(event) => event.target === at.current && onClose()}>
      <div class="dialog-in" tabIndex={-1}>
        <header><h2>{title}</h2><IconButton icon="close" label={t("close")} onClick={onClose} /></header>
        {children}
      </div>
    </dialog>
  );
}
