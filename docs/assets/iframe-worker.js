// A browser starts no worker for a page from `file://`. There, the site's search runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.frame = document.body.appendChild(document.createElement("iframe"));
      this.frame.hidden = true;
      const scope = this.frame.contentWindow;
      this.ready = new Promise((resolve, reject) => {
        scope.postMessage = (data) => this.deliver(data);
        const script = scope.document.createElement("script");
        script.onload = resolve;
        script.onerror = reject;
        script.src = url;
        scope.document.body.append(script);
      });
      this.ready.catch((error) => this.onerror?.(error));
    }

    // As between threads, each side gets a copy.
    deliver(data) {
      const copy = structuredClone(data);
      setTimeout(() => this.onmessage?.({ data: copy }));
    }

    postMessage(data) {
      const copy = structuredClone(data);
      this.ready.then(() => this.frame.contentWindow.onmessage({ data: copy }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
