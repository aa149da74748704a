// The text of files, and images for models that see. What is neither an image nor a PDF has to be text.
import { scriptURL } from "./dom.js";
import { t } from "./i18n.js";

const MOST = 20; // MB
const SIDE = 1536, LARGE = 1 << 20; // pixels of an image's longer side; letters of one that stays a PNG
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

export const isImage = (file) => /^image\/(?!svg)/.test(file.type);

// An image drawn anew: upright, no larger than models look at, and without what cameras write beside it, such as the place.
async function imageOf(file) {
  const bits = await createImageBitmap(file).catch(() => { throw new Error(t("file-bad", { name: file.name, why: file.type })); });
  const scale = Math.min(1, SIDE / Math.max(bits.width, bits.height)), canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bits.width * scale));
  canvas.height = Math.max(1, Math.round(bits.height * scale));
  const paint = canvas.getContext("2d");
  paint.drawImage(bits, 0, 0, canvas.width, canvas.height);
  bits.close();
  const png = file.type === "image/jpeg" ? "" : canvas.toDataURL("image/png");
  if (png && png.length < LARGE) return png;
  paint.globalCompositeOperation = "destination-over";
  paint.fillStyle = "#fff"; // JPEG knows nothing transparent
  paint.fillRect(0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

// Returns { name, text } or { name, image }, the latter as a data URL.
export async function attach(file) {
  if (file.size > MOST << 20) throw new Error(t("file-large", { name: file.name, n: MOST }));
  if (isImage(file)) return { name: file.name, image: await imageOf(file) };
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
