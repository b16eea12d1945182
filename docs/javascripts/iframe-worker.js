// Search for pages that are opened as files. Browsers start no workers from file:// addresses; the search runs in a hidden
// frame instead. Pages from a server use real workers. The theme would load the same from unpkg.com.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.onerror = null;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.document.open();
      inside.document.write("<!doctype html><title>search</title>");
      inside.document.close();
      inside.postMessage = (data) => this.tell("message", new MessageEvent("message", { data }));
      inside.importScripts = (...urls) =>
        urls.reduce((before, each) => before.then(() => this.load(inside, each)), Promise.resolve());
      this.inside = inside;
      this.loaded = this.load(inside, url).catch((event) => this.tell("error", event));
    }

    load(inside, url) {
      return new Promise((resolve, reject) => {
        const script = inside.document.createElement("script");
        script.src = new URL(url, document.baseURI);
        script.onload = resolve;
        script.onerror = () => reject(new ErrorEvent("error", { message: `${url} cannot be loaded` }));
        inside.document.head.append(script);
      });
    }

    tell(kind, event) {
      this.dispatchEvent(event);
      this[`on${kind}`]?.(event);
    }

    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
