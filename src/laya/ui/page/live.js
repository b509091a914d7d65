// One stream of events while the page is in sight; a hidden tab costs the server nothing.

let stream = null;

function liveState(word, kind) {
  byId("live").className = `state ${kind}`;
  byId("live").textContent = word;
}

function watch() {
  if (stream) return;
  liveState("connecting", "");
  stream = new EventSource("/ui/events");
  stream.onmessage = (event) => {
    show(JSON.parse(event.data));
    liveState("live", "good");
  };
  stream.onerror = () => {
    const closed = stream.readyState === EventSource.CLOSED;
    liveState(closed ? "refused, trying again" : "connection lost", "bad");
    if (closed) {  // the server answered, and not with events: too many look, or the key has changed
      unwatch();
      setTimeout(() => { if (!document.hidden) watch(); }, 5000);
    }
  };
}

function unwatch() {
  if (stream) stream.close();
  stream = null;
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) { unwatch(); liveState("paused", ""); } else watch();
});

watch();
