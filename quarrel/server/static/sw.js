// Keeps the page's own files for when the server cannot be reached: what was said can then still be read. The server's
// copy always comes first.
const CACHE = "quarrel-page";
const LATER = /^(api|pdf|.*\/pdf|LICENSES)/; // of use with a server only, or large

self.addEventListener("install", (event) => event.waitUntil((async () => {
  self.skipWaiting();
  const { files } = await (await fetch("/static/built.json")).json();
  const wanted = Object.keys(files).filter((name) => !LATER.test(name) && name !== "index.html").map((name) => `/static/${name}`);
  await (await caches.open(CACHE)).addAll(["/", ...wanted].map((url) => new Request(url, { headers: { Accept: "text/html,*/*" } })));
})()));
self.addEventListener("activate", (event) => event.waitUntil(self.clients.claim()));
self.addEventListener("fetch", (event) => {
  const { method, url } = event.request, { origin, pathname } = new URL(url);
  if (method !== "GET" || origin !== self.location.origin || !(pathname === "/" || pathname.startsWith("/static/"))) return;
  event.respondWith(fetch(event.request).then((answer) => {
    if (answer.ok) {
      const kept = answer.clone();
      event.waitUntil(caches.open(CACHE).then((cache) => cache.put(event.request, kept)));
    }
    return answer;
  }).catch(async () => (await caches.match(event.request)) ?? (await caches.match(event.request, { ignoreSearch: true, ignoreVary: true })) ?? Response.error()));
});
