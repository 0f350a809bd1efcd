// Search runs in a worker, which browsers refuse to pages that were opened from the disk: there a hidden frame does it.
// The offline plugin would fetch such a stand-in from the network.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const waiting = [];
      this.deliver = (data) => waiting.push(data);
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.document.open(); // some browsers would put an empty page in its place later
      inside.document.write("<!doctype html><body></body>");
      inside.document.close();
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      script.src = new URL(url, location.href);
      script.onload = () => {
        this.deliver = (data) => inside.dispatchEvent(new MessageEvent("message", { data }));
        waiting.forEach(this.deliver);
      };
      inside.document.body.append(script);
    }

    postMessage(data) {
      this.deliver(data);
    }
  };
  window.Worker = window.IFrameWorker;
}
