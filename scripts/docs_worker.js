// Pages opened from disk may start no worker, and the site's search runs in one. There it runs in a frame instead:
// messages go in and out as they would with a worker.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inside.importScripts = (...urls) => urls.reduce((done, one) => done.then(() => this.load(one)), Promise.resolve());
      this.load(url).then(() => {
        for (const data of this.waiting) this.send(data);
        this.waiting = null;
      });
    }

    load(url) {
      return new Promise((done, failed) => {
        const script = this.inside.document.createElement("script");
        Object.assign(script, { src: String(url), onload: done, onerror: failed });
        this.inside.document.body.append(script);
      });
    }

    send(data) {
      this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }));
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.send(data);
    }
  };
}
