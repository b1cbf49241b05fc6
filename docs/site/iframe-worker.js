// Browsers refuse workers to pages that are opened as files. The search, a worker that needs no other
// script, then runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      const page = this.inside.document;
      page.open();
      page.write("<body></body>");
      page.close();
      this.inside.postMessage = (data) =>
        this.dispatchEvent(new MessageEvent("message", { data }));
      const script = page.createElement("script");
      script.src = url;
      this.isReady = new Promise((resolve) => (script.onload = resolve));
      page.body.append(script);
    }

    postMessage(data) {
      const event = new MessageEvent("message", { data });
      this.isReady.then(() => this.inside.dispatchEvent(event));
    }
  };
}
