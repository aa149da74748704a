// Colours for the languages that models write most, as a tree of scopes.
import hljs from "highlight.js/lib/core";
import bash from "highlight.js/lib/languages/bash";
import c from "highlight.js/lib/languages/c";
import cpp from "highlight.js/lib/languages/cpp";
import csharp from "highlight.js/lib/languages/csharp";
import css from "highlight.js/lib/languages/css";
import diff from "highlight.js/lib/languages/diff";
import dockerfile from "highlight.js/lib/languages/dockerfile";
import go from "highlight.js/lib/languages/go";
import ini from "highlight.js/lib/languages/ini";
import java from "highlight.js/lib/languages/java";
import javascript from "highlight.js/lib/languages/javascript";
import json from "highlight.js/lib/languages/json";
import kotlin from "highlight.js/lib/languages/kotlin";
import lua from "highlight.js/lib/languages/lua";
import makefile from "highlight.js/lib/languages/makefile";
import markdown from "highlight.js/lib/languages/markdown";
import php from "highlight.js/lib/languages/php";
import powershell from "highlight.js/lib/languages/powershell";
import python from "highlight.js/lib/languages/python";
import r from "highlight.js/lib/languages/r";
import ruby from "highlight.js/lib/languages/ruby";
import rust from "highlight.js/lib/languages/rust";
import sql from "highlight.js/lib/languages/sql";
import swift from "highlight.js/lib/languages/swift";
import typescript from "highlight.js/lib/languages/typescript";
import xml from "highlight.js/lib/languages/xml";
import yaml from "highlight.js/lib/languages/yaml";

const LANGUAGES = { bash, c, cpp, csharp, css, diff, dockerfile, go, ini, java, javascript, json, kotlin, lua, makefile, markdown, php, powershell, python, r, ruby, rust, sql, swift, typescript, xml, yaml };
for (const [name, language] of Object.entries(LANGUAGES)) hljs.registerLanguage(name, language);

// Collects what highlight.js would write as HTML.
class Tree {
  constructor(options) {
    this.options = options;
    this.root = { children: [] };
    this.stack = [this.root];
  }
  addText(text) {
    if (text) this.stack.at(-1).children.push(text);
  }
  startScope(scope) {
    const node = { scope: `hljs-${scope.split(".")[0].replace("language:", "")}`, children: [] };
    this.stack.at(-1).children.push(node);
    this.stack.push(node);
  }
  endScope() {
    this.stack.pop();
  }
  openNode(scope) { this.startScope(scope); }
  closeNode() { this.endScope(); }
  __addSublanguage(emitter, name) {
    this.stack.at(-1).children.push(...(name ? [{ scope: `language-${name}`, children: emitter.root.children }] : emitter.root.children));
  }
  toHTML() { return ""; }
  finalize() {}
}
hljs.configure({ __emitter: Tree });

// Null where the language is not known.
export function highlight(text, language) {
  if (!hljs.getLanguage(language)) return null;
  try {
    return hljs.highlight(text, { language, ignoreIllegals: true })._emitter.root.children;
  } catch {
    return null;
  }
}
