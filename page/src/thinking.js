// A model's thoughts and its answer, told apart in what it wrote, also while it still writes.
const MARKS = [
  ["<think>", "</think>"], ["<thinking>", "</thinking>"], ["<seed:think>", "</seed:think>"], ["[THINK]", "[/THINK]"],
  ["<|channel|>analysis<|message|>", "<|end|>"], ["<|START_THINKING|>", "<|END_THINKING|>"],
];
const REST = /<\|start\|>assistant|<\|channel\|>final<\|message\|>|<\|channel\|>commentary[^<]*<\|message\|>|<\|return\|>|<\|START_RESPONSE\|>|<\|END_RESPONSE\|>/g;

// Returns { thoughts, answer, open }. open: the thoughts have not ended.
export function split(text) {
  if (!/<\/?think|THINK|seed:think|<\|channel/.test(text)) return { thoughts: "", answer: text, open: false };
  const begun = text.trimStart();
  for (const [opening, closing] of MARKS) {
    if (begun.startsWith(opening)) {
      const end = begun.indexOf(closing);
      if (end < 0) return { thoughts: begun.slice(opening.length), answer: "", open: true };
      return { thoughts: begun.slice(opening.length, end).trim(), answer: begun.slice(end + closing.length).replace(REST, "").trimStart(), open: false };
    }
  }
  // A template may open the thoughts itself: then the text has only their end.
  const [, closing] = MARKS.find(([opening, closing]) => text.includes(closing) && !text.includes(opening)) ?? [];
  if (!closing) return { thoughts: "", answer: text.replace(REST, ""), open: false };
  const end = text.indexOf(closing);
  return { thoughts: text.slice(0, end).trim(), answer: text.slice(end + closing.length).trimStart(), open: false };
}
