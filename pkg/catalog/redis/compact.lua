-- Forgets tombstones whose time is over, a bounded number of them.
local P, limit = ARGV[1], tonumber(ARGV[2])
local clock = redis.call('TIME')
local now = string.format('%.0f', tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000))
local expired = redis.call('ZRANGEBYSCORE', P .. 'tx', '-inf', now, 'LIMIT', 0, limit)
for _, key in ipairs(expired) do
  local scope, uid = string.match(key, '^([^/]+/[^/]+)/(.+)$')
  redis.call('DEL', P .. 't:' .. key)
  redis.call('ZREM', P .. 'ti:' .. scope, uid)
  redis.call('ZREM', P .. 'tx', key)
end
return #expired
