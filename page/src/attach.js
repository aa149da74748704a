// The text of files. What is no PDF has to be text.
import { scriptURL } from "./dom.js";
import { t } from "./i18n.js";

const MOST = 20; // MB
let reader = null;

async function pdfText(file) {
  reader ??= import("pdfjs-dist/build/pdf.min.mjs").then((pdf) => {
    pdf.GlobalWorkerOptions.workerPort = new Worker(scriptURL("/static/pdf.worker.js"), { type: "module" });
    return pdf;
  });
  const pdf = await reader, task = pdf.getDocument({ data: await file.arrayBuffer(), isEvalSupported: false, useWorkerFetch: false, useWasm: false, disableFontFace: true });
  const book = await task.promise, pages = [];
  for (let n = 1; n <= book.numPages; n++) {
    const { items } = await (await book.getPage(n)).getTextContent();
    pages.push(items.map((item) => item.str + (item.hasEOL ? "\n" : "")).join(""));
  }
  await task.destroy();
  return pages.join("\n\n").trim();
}

export async function attach(file) {
  if (file.size > MOST << 20) throw new Error(t("file-large", { name: file.name, n: MOST }));
  let text;
  if (file.type === "application/pdf" || /\.pdf$/i.test(file.name)) {
    text = await pdfText(file).catch((error) => { throw new Error(t("file-bad", { name: file.name, why: error.message })); });
  } else {
    try {
      text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    } catch {
      throw new Error(t("file-kind", { name: file.name }));
    }
    if (text.includes("\0")) throw new Error(t("file-kind", { name: file.name }));
  }
  if (!text.trim()) throw new Error(t("file-empty", { name: file.name }));
  return { name: file.name, text };
}
