/* Browsers start no worker from file:// pages. There the search runs its worker's script in a hidden frame instead. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.inside = frame.contentWindow
      const script = this.inside.document.createElement("script")
      script.src = new URL(url, location.href).href
      this.inside.postMessage = data => this.deliver(this, data)
      script.onload = () => {
        this.ready = true
        this.waiting.splice(0).forEach(data => this.deliver(this.inside, data))
      }
      this.inside.document.head.appendChild(script)
    }
    deliver(target, data) {
      setTimeout(() => {
        const event = new (target === this ? MessageEvent : this.inside.MessageEvent)("message", { data })
        target.dispatchEvent(event)
        if (target === this && this.onmessage) this.onmessage(event)
      })
    }
    postMessage(data) {
      if (this.ready) this.deliver(this.inside, data)
      else this.waiting.push(data)
    }
    terminate() {}
  }
}
