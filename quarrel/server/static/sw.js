// Keeps the page's own files for when the server cannot be reached: what was said can then still be read. The server's
// copy always comes first.
const CACHE = "quarrel-page";

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
  }).catch(async () => (await caches.match(event.request, { ignoreSearch: pathname === "/" })) ?? Response.error()));
});
