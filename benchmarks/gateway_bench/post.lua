-- wrk's requests: bodies from the file that `bodies.py` wrote, in turn, under 16 different keys; the result as one JSON line.
local requests, at = {}, 0

function init(args)
  local file = assert(io.open(args[1], "rb"))
  while true do
    local length = file:read("*l")
    if not length then break end
    local headers = {["content-type"] = "application/json", ["authorization"] = "Bearer bench-" .. (#requests % 16)}
    requests[#requests + 1] = wrk.format("POST", wrk.path, headers, file:read(tonumber(length)))
  end
  file:close()
end

function request()
  at = at % #requests + 1
  return requests[at]
end

function done(summary, latency, _)
  local errors = summary.errors
  io.write(string.format(
    'RESULT {"requests":%d,"duration_us":%d,"p50_us":%.1f,"p99_us":%.1f,"refused":%d,"broken":%d}\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99), errors.status,
    errors.connect + errors.read + errors.write + errors.timeout))
end
