// The WebSocket: connects again with growing pauses, and says what state it is in.
const FIRST_PAUSE = 500, LONGEST_PAUSE = 30000, HEARTBEAT = 30000;

export class Socket extends EventTarget {
  #socket = null;
  #pause = FIRST_PAUSE;
  #beat = null;

  constructor(key) {
    super();
    this.key = key;
  }

  get open() {
    return this.#socket?.readyState === WebSocket.OPEN;
  }

  connect() {
    const address = `${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/ws`;
    const socket = new WebSocket(address, this.key ? ["quarrel", `quarrel-key.${this.key}`] : ["quarrel"]);
    this.#socket = socket;
    socket.onopen = () => {
      this.#pause = FIRST_PAUSE;
      this.#tell("connected");
      this.#beat = setInterval(() => this.send("ping", {}), HEARTBEAT);
    };
    socket.onmessage = (event) => {
      const { type, payload } = JSON.parse(event.data);
      this.dispatchEvent(new CustomEvent(type, { detail: payload ?? {} }));
    };
    socket.onclose = () => {
      clearInterval(this.#beat);
      if (this.#socket !== socket) return;
      this.#tell("disconnected");
      setTimeout(() => this.#socket === socket && this.connect(), this.#pause);
      this.#pause = Math.min(this.#pause * 2, LONGEST_PAUSE);
    };
  }

  restart(key) {
    this.key = key;
    const old = this.#socket;
    this.#pause = FIRST_PAUSE;
    this.connect();
    old?.close();
  }

  send(type, payload) {
    if (!this.open) return false;
    this.#socket.send(JSON.stringify({ type, payload }));
    return true;
  }

  #tell(state) {
    this.dispatchEvent(new CustomEvent("state", { detail: state }));
  }
}
