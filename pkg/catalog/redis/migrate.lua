-- Brings a bounded number of tombstones of the first schema into today's form, those that expire first before the others: a hash for
-- each, t:KEY, with an index of uids, ti:TENANT/KIND, and one of the times, tx. Tells how many are left.
local P, limit = ARGV[1], tonumber(ARGV[2])
local call = redis.call
for _, key in ipairs(call('ZRANGE', P .. 'tx', 0, limit - 1)) do
  local scope, uid = string.match(key, '^([^/]+/[^/]+)/(.+)$')
  local h = call('HMGET', P .. 't:' .. key, 'v', 's', 'a', 'e', 'b')
  if h[1] and #call('ZRANGEBYLEX', P .. 't:' .. scope, '[' .. uid .. ' ', '(' .. uid .. '!') == 0 then
    local life = string.format('%.0f', tonumber(h[4]) - tonumber(h[3]))
    call('ZADD', P .. 't:' .. scope, 0, table.concat({ uid, h[1], h[2], h[3], life, h[5] }, ' '))
    local line = redis.pcall('XADD', P .. 'tl', h[4] .. '-*', 'k', key)
    if type(line) == 'table' then call('XADD', P .. 'tl', '*', 'k', key) end
  end
  call('DEL', P .. 't:' .. key)
  call('ZREM', P .. 'ti:' .. scope, uid)
  call('ZREM', P .. 'tx', key)
end
return call('ZCARD', P .. 'tx')
