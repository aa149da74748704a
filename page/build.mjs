// Builds the page into quarrel/server/static, which is what ships: no Node is needed to run it.
// `npm ci && npm run build`. built.json has the hash of each source and of each file made of it; a test compares them.
import { createHash } from "node:crypto";
import { cp, mkdir, readFile, readdir, rm, writeFile } from "node:fs/promises";
import { dirname, join, relative } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const target = join(here, "..", "quarrel", "server", "static");
const modules = join(here, "node_modules");

// KaTeX offers each font in three formats; every browser that runs this page takes the first.
const oneFormat = {
  name: "one-format",
  setup: (b) => b.onLoad({ filter: /katex\.css$/ }, async ({ path }) => ({
    contents: (await readFile(path, "utf8")).replace(/,\s*url\([^)]*\.(?:woff|ttf)\)\s*format\("[a-z]+"\)/g, ""),
    loader: "css",
  })),
};

async function walk(folder) {
  const found = [];
  for (const entry of await readdir(folder, { withFileTypes: true })) {
    const path = join(folder, entry.name);
    if (entry.isDirectory()) found.push(...(await walk(path)));
    else found.push(path);
  }
  return found.sort();
}

const hash = async (path) => createHash("sha256").update(await readFile(path)).digest("hex");
const hashes = async (paths, root) => Object.fromEntries(await Promise.all(paths.map(async (p) => [relative(root, p), await hash(p)])));

async function licenses() {
  const { dependencies } = JSON.parse(await readFile(join(here, "package.json"), "utf8"));
  const parts = [];
  for (const name of Object.keys(dependencies)) {
    const { version, license } = JSON.parse(await readFile(join(modules, name, "package.json"), "utf8"));
    const file = (await readdir(join(modules, name))).find((f) => /^licen[cs]e/i.test(f));
    parts.push(`${name} ${version} (${license})\n\n${(await readFile(join(modules, name, file), "utf8")).trim()}\n`);
  }
  return parts.join(`\n${"-".repeat(80)}\n\n`);
}

await rm(target, { recursive: true, force: true });
await mkdir(target, { recursive: true });
await cp(join(here, "public"), target, { recursive: true });
await cp(join(modules, "pdfjs-dist", "build", "pdf.worker.min.mjs"), join(target, "pdf.worker.js"));
await build({
  entryPoints: { app: join(here, "src", "main.jsx"), api: join(here, "src", "api-page.js") },
  outdir: target,
  bundle: true,
  splitting: true,
  format: "esm",
  minify: true,
  target: ["chrome111", "firefox114", "safari16.4"],
  jsx: "automatic",
  jsxImportSource: "preact",
  entryNames: "[name]",
  chunkNames: "chunks/[name]-[hash]",
  assetNames: "fonts/[name]",
  loader: { ".woff2": "file" },
  legalComments: "none",
  plugins: [oneFormat],
  logLevel: "warning",
});
await writeFile(join(target, "LICENSES.txt"), await licenses());

// A browser may keep what it has for a while: the names that the page asks for change with their contents.
const index = join(target, "index.html");
const version = async (name) => (await hash(join(target, name))).slice(0, 12);
let html = await readFile(index, "utf8");
for (const name of ["app.js", "app.css"]) html = html.replaceAll(`/static/${name}`, `/static/${name}?v=${await version(name)}`);
await writeFile(index, html);

const sources = [...(await walk(join(here, "src"))), ...(await walk(join(here, "public"))), join(here, "build.mjs"), join(here, "package-lock.json")];
const made = { sources: await hashes(sources, here), files: await hashes(await walk(target), target) };
await writeFile(join(target, "built.json"), `${JSON.stringify(made, null, 1)}\n`);
