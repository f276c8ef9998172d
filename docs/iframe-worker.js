// Search, where a page is opened from a disk: browsers start no worker there, so its script runs in a hidden frame.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = (...urls) => urls.forEach(source => this.add(inside, source))
      this.ready = this.add(inside, new URL(url, document.baseURI))
      this.postMessage = data => this.ready.then(() => inside.dispatchEvent(new MessageEvent("message", { data })))
    }

    add(inside, source) {
      const script = inside.document.createElement("script")
      script.src = source
      inside.document.body.append(script)
      return new Promise(resolve => (script.onload = resolve))
    }

    terminate() {}
  }
