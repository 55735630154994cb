-- Forgets tombstones whose time is over, a bounded number of them, unread; and tells whether there are any of the first schema.
local P, limit = ARGV[1], tonumber(ARGV[2])
local call = redis.call
local clock = call('TIME')
local now = string.format('%.0f', tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000))
local over = call('XRANGE', P .. 'tl', '-', now, 'COUNT', limit)
for _, entry in ipairs(over) do
  local scope, uid = string.match(entry[2][2], '^([^/]+/[^/]+)/(.+)$')
  call('ZREMRANGEBYLEX', P .. 't:' .. scope, '[' .. uid .. ' ', '(' .. uid .. '!')
end
if #over > 0 then
  local ms, n = string.match(over[#over][1], '^(%d+)-(%d+)$')
  call('XTRIM', P .. 'tl', 'MINID', '=', ms .. '-' .. string.format('%.0f', tonumber(n) + 1))
end
return { #over, call('EXISTS', P .. 'tx') }
